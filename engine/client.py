"""The caller's end of an engine host: starts it, talks to it, watches it, ends it. Torch-free.

A host that crashes, hangs past a call's limit or outgrows its memory costs its caller one `HostFailure`; `restart` gives a
fresh one.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine import sandbox, wire

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_KV_BYTES = 512 << 20
MEMORY_POLL_S = 0.05
LOG_TAIL = 4000
SPINS = (
    10_000  # a waiting OpenMP thread spins about 0.1 ms, then sleeps: without a limit one busy core stalls every step
)


class HostFailure(Exception):
    """A call that got no result. `code` is stable; `fatal` when the host itself is gone."""

    def __init__(self, code: str, message: str, mend: str = "", log_tail: str = "", fatal: bool = False) -> None:
        super().__init__(f"{message} {mend}".strip())
        self.code, self.message, self.mend, self.log_tail, self.fatal = code, message, mend, log_tail, fatal


def cores() -> int:
    return len(os.sched_getaffinity(0))


class HostClient:
    """One engine host. Calls are answered one at a time, in order; any thread may call."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "bfloat16",
        threads: int = 0,
        kv_bytes: int = DEFAULT_KV_BYTES,
        log: Path | None = None,
        memory_limit_bytes: int = 0,
        start_timeout_s: float = 120,
        even_routing: bool = False,
    ) -> None:
        self.model, self.dtype, self.threads, self.kv_bytes = Path(model), dtype, threads or cores(), kv_bytes
        self.memory_limit = memory_limit_bytes or int(_physical_memory() * 0.6)
        self.start_timeout_s, self.even_routing = start_timeout_s, even_routing
        self._scratch = Path(tempfile.mkdtemp(prefix="polymorph-host-"))
        self.log = Path(log) if log else self._scratch / "host.log"
        self._log_from = 0  # where the log of the newest candidate begins
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_for = ""
        self._reader = msgspec.msgpack.Decoder(wire.Reply)
        self.ready: wire.Ready | None = None

    def start(self) -> wire.Ready:
        """Starts the host and waits until the weights are mapped. Raises HostFailure."""
        command = [sys.executable, "-m", "engine.host", "--model", str(self.model), "--dtype", self.dtype]
        command += ["--threads", str(self.threads), "--kv-bytes", str(self.kv_bytes)]
        command += ["--even-routing"] if self.even_routing else []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._killed_for = ""
        with self.log.open("ab") as log:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=sandbox.clean_environment(str(self._scratch))
                | {"OMP_NUM_THREADS": str(self.threads), "GOMP_SPINCOUNT": str(SPINS)},
                start_new_session=True,
            )
        threading.Thread(target=self._watch_memory, args=(self._process,), daemon=True).start()
        body = self._receive(time.monotonic() + self.start_timeout_s)
        assert isinstance(body, wire.Ready)
        self.ready = body
        return body

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def call(self, message: wire.Request, timeout_s: float = 60.0) -> wire.Body:
        """The reply's body. Raises HostFailure: `candidate_error` and the like leave the host running; `host_exited`,
        `host_timeout` and `out_of_memory` are fatal to it.
        """
        with self._lock:
            if not self.alive:
                raise self._gone()
            deadline = time.monotonic() + timeout_s
            if isinstance(message, wire.Load) and self.log.is_file():
                self._log_from = self.log.stat().st_size
            self._send(wire.encode(message), deadline)
            return self._receive(deadline)

    def restart(self) -> wire.Ready:
        self.kill()
        return self.start()

    def kill(self, reason: str = "") -> None:
        """Ends the host and every process of its session at once."""
        if self._process is None:
            return
        self._killed_for = self._killed_for or reason
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()

    def close(self) -> None:
        """Ends the host and removes its scratch folder."""
        if self.alive:
            with contextlib.suppress(HostFailure):
                self.call(wire.Shutdown(), timeout_s=2)
        self.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> HostClient:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, frame: bytes, deadline: float) -> None:
        pipe = self._pipe("stdin")
        os.set_blocking(pipe.fileno(), False)
        view = memoryview(frame)
        while view:
            _, writable, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
            if not writable:
                raise self._timed_out()
            try:
                view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._gone() from None

    def _receive(self, deadline: float) -> wire.Body:
        length = int.from_bytes(self._read(4, deadline), "little")
        if length > wire.MAX_FRAME:
            self.kill("its reply was not a frame")
            raise self._gone()
        try:
            reply = self._reader.decode(self._read(length, deadline))
        except msgspec.DecodeError:
            self.kill("its reply could not be read")
            raise self._gone() from None
        if reply.ok and reply.body is not None:
            return reply.body
        error = reply.error or wire.HostError("candidate_error", "the host gave no reason")
        raise HostFailure(error.code, error.message, error.mend, reply.log_tail or self.log_tail())

    def _read(self, count: int, deadline: float) -> bytes:
        pipe, parts, missing = self._pipe("stdout"), [], count
        while missing:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise self._timed_out()
            part = os.read(pipe.fileno(), min(missing, 1 << 20))
            if not part:
                raise self._gone()
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _pipe(self, name: str) -> BinaryIO:
        pipe = getattr(self._process, name, None)
        if pipe is None or pipe.closed:
            raise self._gone()
        return pipe

    def _timed_out(self) -> HostFailure:
        self.kill("it did not answer in time")
        mend = "Look for an endless loop, or give the call more time."
        return HostFailure(
            "host_timeout", "The engine host did not answer in time and was ended.", mend, self.log_tail(), True
        )

    def _gone(self) -> HostFailure:
        code = "host_exited"
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        status = self._process.returncode if self._process else None
        message, mend = f"The engine host ended (exit status {status}).", "Its log says why; start it again."
        if self._killed_for == "memory":
            code, message = (
                "out_of_memory",
                f"The engine host grew past {self.memory_limit / 1e9:.1f} GB and was ended.",
            )
            mend = "The candidate allocates too much; or raise the limit."
        elif self._killed_for:
            message = f"The engine host was ended: {self._killed_for}."
        return HostFailure(code, message, mend, self.log_tail(), True)

    def log_tail(self) -> str:
        """The end of what was said since the newest candidate was loaded."""
        if not self.log.is_file():
            return ""
        with self.log.open("rb") as handle:
            handle.seek(max(self._log_from, self.log.stat().st_size - LOG_TAIL))
            return handle.read().decode(errors="replace")

    def _watch_memory(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the host once its resident memory passes the limit. Mapped weights are shared and not counted."""
        page = os.sysconf("SC_PAGE_SIZE")
        statm = Path(f"/proc/{process.pid}/statm")
        while process.poll() is None:
            try:
                _, resident, shared = (int(n) for n in statm.read_text().split()[:3])
            except (OSError, ValueError):
                return
            if (resident - shared) * page > self.memory_limit:
                self._killed_for = "memory"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                return
            time.sleep(MEMORY_POLL_S)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
