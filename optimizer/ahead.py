"""Compiles what will be measured next while the engine measures, and stands still while something is timed.

The compiler runs niced in a process group of our session. It is suspended by a signal to that group whenever `quiet` is held.
If this process is killed meanwhile, the kernel ends the suspended group: an orphaned group with stopped members gets SIGHUP, which the
compiler heeds also where this process was told to ignore it (nohup).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kernels.build import Compiler
from optimizer.builder import Built
from optimizer.records import Proposal
from optimizer.times import Quiet

AHEAD = 3  # proposals of the queue that are worth compiling before they are asked for


class Workshop:
    """Use as a context: the compiling thread lives inside it. Outside, everything is built when it is taken."""

    def __init__(self, build: Callable[[Proposal, Compiler | None], Built], quiet: Quiet) -> None:
        self._build, self._quiet = build, quiet
        self._wanted: list[Proposal] = []
        self._built: dict[str, Future[Built]] = {}
        self._change = threading.Condition()
        self._open = False
        self._thread: threading.Thread | None = None
        self._group = Group()

    def __enter__(self) -> Workshop:
        self._open = True
        self._quiet.on_hold.append(self._group.suspend)
        self._quiet.on_release.append(self._group.go_on)
        self._thread = threading.Thread(target=self._work, daemon=True, name="compiling ahead")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._change:
            self._open = False
            self._change.notify_all()
        self._group.end()
        if self._thread:
            self._thread.join()
        self._quiet.on_hold.remove(self._group.suspend)
        self._quiet.on_release.remove(self._group.go_on)

    def want(self, proposals: Sequence[Proposal]) -> None:
        """Best first. The first that need a compiler are built ahead."""
        with self._change:
            self._wanted = [p for p in proposals if compiles(p)][:AHEAD]
            self._change.notify_all()

    def ready(self, proposal: Proposal) -> bool:
        """Whether taking it takes no compiler's time."""
        if not compiles(proposal):
            return True
        built = self._built.get(proposal.id)
        return built is not None and built.done()

    def take(self, proposal: Proposal) -> Built:
        """Waits for a build that has begun, builds what none has. Raises ArtifactError for what is no candidate."""
        with self._change:
            built = self._built.pop(proposal.id, None)
            self._wanted = [p for p in self._wanted if p.id != proposal.id]
        return built.result() if built else self._build(proposal, None)

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._next() or not self._open)
                proposal = self._next()
                if not self._open or proposal is None:
                    return
                future: Future[Built] = Future()
                self._built[proposal.id] = future
            try:
                future.set_result(self._build(proposal, self._group.run))
            except BaseException as error:  # it is raised where the build is taken
                future.set_exception(error)

    def _next(self) -> Proposal | None:
        return next((p for p in self._wanted if p.id not in self._built), None)


class Group:
    """The process group of the compiler that runs just now, if one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._held = self._ended = False

    def run(self, command: Sequence[str], limit_s: float) -> tuple[int, str]:
        """Exit status and output of a command, niced; -1 and no output when it was ended. `limit_s` counts waiting too."""
        with self._lock:
            if self._ended:
                return -1, ""
            process = subprocess.Popen(
                ["env", "--default-signal=HUP", "nice", "-n", "10", *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", process_group=0,
            )  # fmt: skip
            self._pid = process.pid
            if self._held:
                self._signal(signal.SIGSTOP)
        try:
            output, _ = process.communicate(timeout=limit_s)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            process.communicate()
            raise
        finally:
            with self._lock:
                self._pid = 0

    def suspend(self) -> None:
        with self._lock:
            self._held = True
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        with self._lock:
            self._held = False
            self._signal(signal.SIGCONT)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)


def compiles(proposal: Proposal) -> bool:
    return any(name.endswith(".cpp") for name in proposal.files)
