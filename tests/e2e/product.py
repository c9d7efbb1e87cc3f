"""The product as a user starts it: `make run` with a data folder and ports of its own, ended when the block ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"https?://\S+/sign-in/link/\S+/")


@dataclass(frozen=True, slots=True)
class Product:
    url: str
    gateway: str
    link: str
    data: Path
    process: subprocess.Popen[str]

    def manage(self, *arguments: str) -> str:
        """A management command on this product's data folder. Returns its output."""
        command = [sys.executable, "manage.py", *arguments, "--data", str(self.data)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextlib.contextmanager
def running_product(data: Path) -> Iterator[Product]:
    """Fails with the command's output when no sign-in link is printed."""
    port, gateway_port = free_port(), free_port()
    command = ["make", "run", f"PORT={port}", f"GATEWAY_PORT={gateway_port}", f"DATA={data}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("DJANGO_SETTINGS_MODULE", "POLYMORPH_DATA")}
    environment["POLYMORPH_VENV"] = os.environ.get("POLYMORPH_VENV") or str(Path(sys.prefix))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        link = _link(process)
        yield Product(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{gateway_port}", link, data, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal reaches make and what it runs
        process.communicate(timeout=60)


def _link(process: subprocess.Popen[str]) -> str:
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        found = LINK.search(line)
        if found:
            return found[0]
    raise AssertionError(f"the product did not start:\n{''.join(said)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
