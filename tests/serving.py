"""Starting real servers in tests and benchmarks: an API server or a gateway on a free port, ended when the block ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.paths import ROOT


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    cold_start_s: float


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float = 120) -> None:
    """Returns once `url` answers 200. Raises RuntimeError with the log's end when the process ends or time is up."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.02)
    raise RuntimeError(f"{url} did not answer; exit {process.poll()}; log: {log.read_text()[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serve(module: str, arguments: list[str], log: Path, ready: str = "/ready") -> Iterator[Server]:
    """Runs `python -m module arguments --port P` until the block ends."""
    port = free_port()
    start = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--port", str(port)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url + ready, process, log)
        yield Server(url, process, log, time.perf_counter() - start)
    finally:
        stop(process)
