"""API servers as the gateway's children: started, watched, started again when they end, swapped, drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import upstream
from engine.artifacts import ArtifactStore
from engine.models.errors import ModelError
from engine.models.resolve import resolve_model
from engine.wire import EndpointSpec, VersionShare

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
PAUSES_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # before the first start, the second in a row, ...
STEADY_S = 60.0  # a server that served for so long starts again without a pause
DRAIN_S = 60.0
END_S = 15.0
SWAP_TIMEOUT_S = 300.0
STATUS_TIMEOUT_S = 5.0
SUSPECT_S = 0.5


class ServerFailed(Exception):
    """A server did not do what it was asked; the text is for a person."""


@dataclass
class ApiServer:
    """One API server. `version` is what it serves, or is to serve once it has started.

    States: starting, ready, failed (it ended before it was ready; it is tried again), restarting, stopped.
    """

    spec: EndpointSpec
    role: str
    version: VersionShare
    generation: int
    data: Path
    state: str = "starting"
    error: str = ""
    port: int = 0
    pid: int = 0
    host_pid: int = 0
    cold_start_s: float | None = None
    hot_swap_s: float | None = None
    starts: int = 0
    in_flight: int = 0
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # ready, or known to have failed
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = None
    _stopping: bool = False

    def start(self) -> None:
        self._idle.set()
        self._task = asyncio.create_task(self._supervise(), name=f"{self.spec.slug}/{self.role}")

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether it serves, waiting up to `timeout_s` for a server that is on its way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        return self.ready

    async def wait_settled(self) -> None:
        """Returns once it serves. Raises ServerFailed when it ends before that."""
        await self._settled.wait()
        if not self.ready:
            raise ServerFailed(f"the {self.role} server did not start: {self.error}")

    @contextlib.contextmanager
    def serving(self) -> Any:
        """Counts one request, so that ending the server waits for it."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def swap(self, version: VersionShare, generation: int) -> None:
        """Has the running server change its version; it stays the same process. Raises ServerFailed."""
        artifact = ArtifactStore(self.data).get(version.artifact_hash)
        told = {
            "artifact_hash": artifact.hash,
            "path": str(artifact.path),
            "version_id": version.version_id,
            "generation": generation,
        }
        await self.wait_settled()
        status, answer = await self._ask("POST", "/internal/swap", SWAP_TIMEOUT_S, told)
        if status != 200:
            raise ServerFailed(str(answer.get("error", {}).get("message", answer)))
        if artifact.hash != self.version.artifact_hash:
            self.hot_swap_s = answer["hot_swap_s"]
        self.version, self.generation = version, generation

    async def refresh(self) -> None:
        """Asks a ready server for its host's pid, which changes when the host was restarted."""
        if not self.ready:
            return
        with contextlib.suppress(ServerFailed):
            status, answer = await self._ask("GET", "/internal/status", STATUS_TIMEOUT_S)
            if status == 200:
                self.host_pid = answer["host_pid"]

    async def suspect(self) -> None:
        """A connection broke: waits a moment for the process to be seen to end, so that `ready` tells the truth."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUSPECT_S):
                    await self._process.wait()

    async def stop(self, drain_s: float = DRAIN_S) -> None:
        """Lets requests in flight end, for `drain_s` at most, then ends the process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        self._stopping = True
        self._ready.clear()
        await self._end_process()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.state = "stopped"

    def described(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "version_id": self.version.version_id,
            "artifact_hash": self.version.artifact_hash,
            "state": self.state,
            "error": self.error or None,
            "pid": self.pid,
            "host_pid": self.host_pid,
            "port": self.port,
            "cold_start_s": self.cold_start_s,
            "hot_swap_s": self.hot_swap_s,
            "starts": self.starts,
            "in_flight": self.in_flight,
        }

    async def _ask(self, method: str, path: str, timeout_s: float, body: Any = None) -> tuple[int, dict[str, Any]]:
        try:
            async with asyncio.timeout(timeout_s):
                raw = b"" if body is None else json.dumps(body).encode()
                async with await upstream.send(self.port, method, path, raw) as reply:
                    await reply.head()
                    return reply.status, json.loads(await reply.read_all())
        except (upstream.UpstreamDied, TimeoutError, ValueError) as error:
            raise ServerFailed(f"the {self.role} server did not answer: {error or 'it took too long'}") from error

    # -- the process ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Starts the process, and again whenever it ends, until `stop`."""
        failures = 0
        while not self._stopping:
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            served_s = await self._run_once()
            failures = 0 if served_s > STEADY_S else failures + 1

    async def _run_once(self) -> float:
        """One life of the process. Returns the seconds it served."""
        began, served_from = time.monotonic(), 0.0
        try:
            told = await self._spawn()
        except (ModelError, OSError) as error:
            told = {"error": str(error)}
        if "port" in told:
            self.port, self.host_pid, self.cold_start_s = told["port"], told["host_pid"], time.monotonic() - began
            self.state, self.error, served_from = "ready", "", time.monotonic()
            self._ready.set()
            self._settled.set()
        status = await self._process.wait() if self._process is not None else None
        self._ready.clear()
        if self._stopping:
            return 0.0
        if served_from:
            self.state, self.error = "restarting", f"it ended (exit status {status}) and is started again"
            self._settled.clear()
            log.error("%s/%s: %s", self.spec.slug, self.role, self.error)
            return time.monotonic() - served_from
        reason = told.get("error") or f"it ended with exit status {status}; {self.log} says why"
        self.state, self.error = "failed", reason
        log.error("%s/%s did not start: %s", self.spec.slug, self.role, self.error)
        self._settled.set()
        return 0.0

    @property
    def log(self) -> Path:
        return self.data / "endpoints" / self.spec.slug / f"server-{self.role}.log"

    async def _spawn(self) -> dict[str, Any]:
        """Starts the process and returns what it says when it is ready; `{}` when it ends without a word."""
        self._process, self.starts = None, self.starts + 1
        model = await asyncio.to_thread(resolve_model, self.spec.model_path, self.data)
        read_end, write_end = os.pipe()
        try:
            with self.log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(model, write_end),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=ROOT,
                    pass_fds=(write_end,),
                )
            self.pid = self._process.pid
        finally:
            os.close(write_end)
        return await _read_line(read_end)

    def _command(self, model: Path, ready_fd: int) -> list[str]:
        spec, artifact = self.spec, ArtifactStore(self.data).root / self.version.artifact_hash
        values = {
            "--model": model,
            "--name": spec.slug,
            "--artifact": artifact,
            "--data": self.data,
            "--port": 0,
            "--dtype": spec.dtype,
            "--threads": spec.threads,
            "--kv-bytes": spec.kv_bytes,
            "--max-context": spec.max_context,
            "--version-id": self.version.version_id,
            "--generation": self.generation,
            "--host-log": self.log.with_name(f"host-{self.role}.log"),
            "--ready-fd": ready_fd,
            "--parent-pid": os.getpid(),
        }
        return [sys.executable, "-m", "engine.api", *(str(part) for pair in values.items() for part in pair)]

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _read_line(descriptor: int) -> dict[str, Any]:
    """One JSON line from a pipe, or `{}` when its other end closes first. Closes the pipe."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        line = await reader.readline()
        return dict(json.loads(line)) if line else {}
    finally:
        transport.close()
