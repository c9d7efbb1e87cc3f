"""The supervising command's programs: started, started again when they end, all ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polymorph_web.operations import supervisor as module
from polymorph_web.operations.supervisor import Program, Supervisor, own_environment
from tests.paths import ROOT

LIMIT_S = 30
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


def python(name: str, code: str, **values: float) -> Program:
    return Program(name, [sys.executable, "-c", code], **values)  # type: ignore[arg-type]


def until(found: Callable[[], object]) -> None:
    """Returns once `found` gives something true; fails after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process lives; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str]) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", dict(os.environ), tmp_path, said.append)
    yield supervisor
    supervisor.stop()


@pytest.fixture
def watched(supervisor: Supervisor) -> Iterator[Supervisor]:
    stop = threading.Event()
    thread = threading.Thread(target=supervisor.watch, args=(stop,))
    thread.start()
    yield supervisor
    stop.set()
    thread.join()


def test_a_program_that_is_killed_is_started_again(watched: Supervisor, said: list[str]) -> None:
    watched.start(python("worker", SLEEPS))
    first = watched.pids()["worker"]
    os.kill(first, signal.SIGKILL)
    until(lambda: watched.pids()["worker"] != first)
    assert runs(watched.pids()["worker"])
    assert said == [f"worker ended (killed by SIGKILL) and is started again. Its log: {watched.log('worker')}"]


def test_a_program_that_ends_at_once_is_tried_again_and_its_status_told(
    watched: Supervisor, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.05))
    watched.start(python("web", "import sys; open('lives', 'a').write('x'); sys.exit('no port: 3')"))
    until(lambda: (tmp_path / "lives").exists() and len((tmp_path / "lives").read_text()) >= 3)
    assert all("web ended (exit status 1)" in text for text in said)
    assert "no port: 3" in watched.log("web").read_text()


def test_the_pause_before_a_start_grows_and_a_steady_life_ends_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    supervisor.start(python("web", ""))
    running, pauses = supervisor.running["web"], []
    for lived in (1, 1, 1, module.STEADY_S + 1):
        running.process.wait()
        clock[0] = running.began + lived
        supervisor._look(running)
        pauses.append((running.due or clock[0]) - clock[0])
        clock[0] += pauses[-1]
        if running.due is not None:
            supervisor._look(running)
    assert pauses == [0.0, 0.5, 1.0, 0.0]


def test_stopping_ends_all_of_them(supervisor: Supervisor) -> None:
    for name in ("gateway", "web", "worker"):
        supervisor.start(python(name, SLEEPS))
    pids = supervisor.pids()
    assert all(runs(pid) for pid in pids.values())
    supervisor.stop()
    assert not any(runs(pid) for pid in pids.values())
    supervisor.stop()


def test_what_does_not_end_is_killed(supervisor: Supervisor) -> None:
    supervisor.start(python("worker", STUBBORN, patience_s=0.1))
    until(lambda: supervisor.log("worker").read_text())
    supervisor.stop()
    assert supervisor.running["worker"].process.returncode == -signal.SIGKILL


def test_the_signal_that_a_program_wants_ends_it(supervisor: Supervisor) -> None:
    supervisor.start(python("worker", STUBBORN, stop=signal.SIGUSR1, patience_s=60))
    until(lambda: supervisor.log("worker").read_text())
    supervisor.stop()
    assert supervisor.running["worker"].process.returncode == -signal.SIGUSR1


PARENT = """
import os, sys
from pathlib import Path
from polymorph_web.operations.supervisor import Program, Supervisor
supervisor = Supervisor(Path(sys.argv[1]), dict(os.environ), Path(sys.argv[1]))
supervisor.start(Program("child", [sys.executable, "-c", "import time; time.sleep(600)"]))
print(supervisor.pids()["child"], flush=True)
sys.stdin.read()
"""


def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
    until(lambda: not runs(child))


def test_programs_know_their_data_folder_and_keep_temporary_files_in_it(tmp_path: Path) -> None:
    environment = own_environment(tmp_path, {"GATEWAY_URL": "http://x"})
    assert (environment["POLYMORPH_DATA"], environment["GATEWAY_URL"]) == (str(tmp_path), "http://x")
    assert Path(environment["TMPDIR"]).is_dir() and Path(environment["TMPDIR"]).parent == tmp_path
