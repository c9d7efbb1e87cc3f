"""Keeps the product's processes alive: starts them, starts again what ends, and ends all of them together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before a process starts again, by how often it ended at once
STEADY_S = 60.0  # a process that lived so long is started again without a pause
LOOK_S = 0.2
END_S = 10.0
PR_SET_PDEATHSIG = 1
LLM_KEY = "POLYMORPH_LLM_API_KEY"
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


@dataclass(frozen=True, slots=True)
class Program:
    """`stop` is the signal that ends it; what has not ended after `patience_s` is killed. `secrets` are variables of this
    process's environment that it alone is given.
    """

    name: str
    command: list[str]
    stop: int = signal.SIGTERM
    patience_s: float = END_S
    secrets: tuple[str, ...] = ()


@dataclass
class Running:
    program: Program
    process: subprocess.Popen[bytes]
    began: float
    failures: int = 0
    due: float | None = None  # when to start again, once it has ended


@dataclass
class Supervisor:
    """`say` is told, in a sentence, of every process that ended by itself."""

    logs: Path
    environment: Mapping[str, str]
    directory: Path
    say: Callable[[str], None] = print
    running: dict[str, Running] = field(default_factory=dict)

    def start(self, program: Program) -> None:
        self.running[program.name] = Running(program, self._spawn(program), time.monotonic())

    def pids(self) -> dict[str, int]:
        return {name: r.process.pid for name, r in self.running.items()}

    def watch(self, stop: threading.Event) -> None:
        """Returns once `stop` is set."""
        while not stop.wait(LOOK_S):
            for r in self.running.values():
                self._look(r)

    def stop(self) -> None:
        """Ends all, those started last first; returns when none is left."""
        for r in reversed(self.running.values()):
            if r.process.poll() is None:
                r.process.send_signal(r.program.stop)
        for r in reversed(self.running.values()):
            try:
                r.process.wait(r.program.patience_s)
            except subprocess.TimeoutExpired:
                r.process.kill()
                r.process.wait()

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _look(self, r: Running) -> None:
        now, status = time.monotonic(), r.process.poll()
        if status is None:
            return
        if r.due is None:
            r.failures = 1 if now - r.began > STEADY_S else r.failures + 1
            pause = PAUSES_S[min(r.failures - 1, len(PAUSES_S) - 1)]
            r.due = now + pause
            name = r.program.name
            self.say(f"{name} ended ({_told(status)}) and is started again. Its log: {self.log(name)}")
        if now >= r.due:
            r.process, r.began, r.due = self._spawn(r.program), now, None

    def _spawn(self, program: Program) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C in a terminal reaches this process alone, which then ends the others."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.log(program.name).open("ab") as out:
            return subprocess.Popen(
                program.command,
                cwd=self.directory,
                env={**self.environment, **{n: os.environ[n] for n in program.secrets if n in os.environ}},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )


def _end_with_parent() -> None:
    """In the child: a supervisor that is killed leaves nothing behind."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _told(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def own_environment(data: Path, values: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process: this one's but for secrets, with the data folder, and temporary files inside it."""
    temporary = data / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in os.environ.items() if name != LLM_KEY}
    return {**own, "POLYMORPH_DATA": str(data), "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", **values}
