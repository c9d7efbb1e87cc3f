"""vLLM's own OpenAI server on the demo model, started as its documentation says, for one load."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_LIMIT_S = 300.0
SETTINGS = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def started(peers: Path) -> Iterator[str | None]:
    """The server's address, or None when vLLM is not in `peers` or does not come up; its log's end is printed then."""
    program, log = peers / "vllm" / "bin" / "vllm", peers / "vllm-server.log"
    if not program.exists():
        yield None
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(program), "serve", str(peers / "smol"), "--served-model-name", "smol", "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **SETTINGS}, cwd=peers)
    try:
        url = f"http://127.0.0.1:{port}"
        yield url if answers(process, url) else None
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        if process.poll() is None:
            process.kill()


def answers(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return True
        time.sleep(0.5)
    return False
