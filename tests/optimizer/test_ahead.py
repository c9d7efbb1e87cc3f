"""Compiling ahead: it stands still while something is timed, ends with its parent, and its failures come out where a build is taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.artifacts import ArtifactError
from kernels.build import Compiler, has_compiler
from optimizer.ahead import AHEAD, Group, Workshop
from optimizer.builder import Builder, Built
from optimizer.records import Proposal
from optimizer.times import Quiet
from tests.paths import ROOT

PYTHON = "def build(model, settings):\n    return 8\n"
WORKS = ["sh", "-c", "sleep 60 & while :; do :; done"]  # a child of its own, as a compiler's driver has


def proposal(name: str, cpp: str = "") -> Proposal:
    files = {"forward.py": PYTHON} | ({"eight.cpp": cpp} if cpp else {})
    return Proposal(name, "ada", "cache", name, "why", "cpp" if cpp else "python", files)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.01)


def state(pid: int) -> str:
    """As the kernel says it: R, S, T (stopped) ...; nothing for a process that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def members(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_a_compiler_stands_still_while_something_is_timed() -> None:
    group, quiet = Group(), Quiet()
    quiet.on_hold.append(group.suspend)
    quiet.on_release.append(group.go_on)
    thread = threading.Thread(target=group.run, args=(WORKS, 60))
    thread.start()
    until(lambda: len(members(group._pid)) >= 2)
    pids = members(group._pid)
    with quiet:
        until(lambda: {state(pid) for pid in members(group._pid)} == {"T"})
    until(lambda: "T" not in {state(pid) for pid in pids})
    group.end()
    thread.join(10)
    assert not thread.is_alive() and group.run(["true"], 5) == (-1, ""), "what has ended begins nothing more"


def test_a_compiler_that_begins_while_something_is_timed_waits() -> None:
    group, quiet = Group(), Quiet()
    quiet.on_hold.append(group.suspend)
    quiet.on_release.append(group.go_on)
    found: list[tuple[int, str]] = []
    with quiet:
        thread = threading.Thread(target=lambda: found.append(group.run(["echo", "made"], 60)))
        thread.start()
        until(lambda: group._pid > 0 and state(group._pid) == "T")
        assert found == []
    thread.join(10)
    assert found == [(0, "made\n")]


@pytest.mark.parametrize("begin", [[], ["nohup"]], ids=["plain", "nohup"])
def test_a_stopped_compiler_does_not_outlive_its_parent(begin: list[str]) -> None:
    code = (
        "import threading, time\nfrom optimizer.ahead import Group\n"
        f"group = Group()\nthreading.Thread(target=group.run, args=({WORKS!r}, 60), daemon=True).start()\n"
        "while not group._pid:\n    time.sleep(0.01)\n"
        "time.sleep(0.2)\ngroup.suspend()\nprint(group._pid, flush=True)\ntime.sleep(60)\n"
    )
    worker = subprocess.Popen([*begin, sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    group = int(worker.stdout.readline())
    try:
        until(lambda: {state(pid) for pid in members(group)} == {"T"})
        worker.kill()
        worker.wait()
        until(lambda: not members(group))
    finally:
        worker.stdout.close()
        for pid in members(group):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_what_will_be_asked_for_is_compiled_before(tmp_path: Path) -> None:
    builder = Builder(tmp_path)
    good, bad = proposal("good", 'extern "C" int eight() { return 8; }\n'), proposal("bad", "this is no C++;\n")
    with Workshop(builder.build, Quiet()) as workshop:
        assert workshop.ready(proposal("python")) and not workshop.ready(good)
        workshop.want([bad, good, proposal("python")])
        until(lambda: workshop.ready(good) and workshop.ready(bad))
        assert "did not compile" in workshop.take(bad).failure
        built = workshop.take(good)
        assert not built.failure and built.kind == "cpp_fresh"
        assert workshop.take(proposal("python")).kind == "python"
    assert builder.build(good).kind == "cpp_cached"


def test_only_the_next_few_are_compiled_and_faults_come_out_where_they_are_taken() -> None:
    begun: list[str] = []

    def build(wanted: Proposal, run: Compiler | None) -> Built:
        begun.append(wanted.id)
        raise ArtifactError("no candidate")

    with Workshop(build, Quiet()) as workshop:
        many = [proposal(f"p{i}", "int x;") for i in range(AHEAD + 3)]
        workshop.want(many)
        until(lambda: all(workshop.ready(p) for p in many[:AHEAD]))
        assert begun == [p.id for p in many[:AHEAD]]
        with pytest.raises(ArtifactError, match="no candidate"):
            workshop.take(many[0])
