"""The two API servers of a before/after measurement: started on free ports, both ended when the block ends."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
POLL_S = 0.02
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


class MeasureFailed(Exception):
    """A before/after figure cannot be given; `side` is baseline or winner, the text a sentence with the reason."""

    def __init__(self, side: str, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.side, self.log_tail = side, log_tail


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How both sides are served: alike in everything but the artefact."""

    model: Path
    dtype: str = "bfloat16"
    threads: int = 0
    kv_bytes: int = 512 << 20
    name: str = "measured"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `cold_start_s` runs from the start of its process to readiness."""

    side: str
    url: str
    process: subprocess.Popen[bytes]
    cold_start_s: float
    log: Path

    def peak_bytes(self) -> int | None:
        """The most that the server and its host kept resident, mapped weights included; None where that is not known."""
        try:
            return sum(_peak_bytes(pid) for pid in _tree(self.process.pid))
        except (OSError, ValueError, IndexError, StopIteration):
            return None

    def log_tail(self) -> str:
        return _tail(self.log)


@contextlib.contextmanager
def api_server(spec: ServerSpec, artifact: Path, side: str, log_dir: Path) -> Iterator[Server]:
    """Raises MeasureFailed with the log's end when the server does not come up."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log, port, begin = log_dir / f"measure-{side}.log", _free_port(), time.perf_counter()
    command = [sys.executable, "-m", "engine.api", "--model", str(spec.model), "--name", spec.name]
    command += ["--artifact", str(artifact), "--port", str(port), "--dtype", spec.dtype, "--version-id", side]
    command += ["--threads", str(spec.threads), "--kv-bytes", str(spec.kv_bytes)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=_die_with_us
        )
    try:
        _wait_ready(process, port, side, log)
        yield Server(side, f"http://127.0.0.1:{port}", process, time.perf_counter() - begin, log)
    finally:
        _stop(process)


def _die_with_us() -> None:
    """In the child: end when the thread that measures ends, even if it was killed, so that no server is left behind."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait_ready(process: subprocess.Popen[bytes], port: int, side: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(POLL_S)
    ended = process.poll()
    why = f"ended with code {ended}" if ended is not None else f"was not ready within {START_LIMIT_S:g} s"
    raise MeasureFailed(side, f"The {side}'s server {why}.", _tail(log))


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _tail(log: Path, size: int = 4096) -> str:
    data = log.read_bytes() if log.exists() else b""
    return data[-size:].decode(errors="replace")


class CpuWatch:
    """How much processor time went to anything but the measurement, from Linux's own counters; None elsewhere."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self._begin = (time.monotonic(), self._foreign())

    def foreign_cores(self) -> float | None:
        """Cores that other programs kept busy on average since this watch began."""
        now, used = time.monotonic(), self._foreign()
        began, used_before = self._begin
        if used is None or used_before is None or now <= began:
            return None
        return max(0.0, (used - used_before) / (now - began))

    def _foreign(self) -> float | None:
        try:
            fields = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
            return busy - sum(_cpu_s(pid) for s in self._servers for pid in _tree(s.process.pid)) - sum(os.times()[:2])
        except (OSError, ValueError, IndexError):
            return None


def _tree(pid: int) -> list[int]:
    """A process and its living descendants."""
    children = {c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()}
    return [pid, *(p for c in children for p in _tree(int(c)))]


def _cpu_s(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
