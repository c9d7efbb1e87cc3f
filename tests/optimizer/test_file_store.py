"""The file store keeps the store contract, and what only files can lose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from optimizer.config import new_run_id
from optimizer.file_store import FileStore, worker_name
from tests.contracts.store_contract import CONFIG, StoreContract, experiment
from tests.paths import ROOT


class FileHarness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, config: dict[str, Any]) -> str:
        run_id = new_run_id()
        self.store().create(run_id, config)
        return run_id

    def store(self) -> FileStore:
        return FileStore(self.folder)

    def cancel(self, run_id: str) -> None:
        self.store().cancel(run_id)


@pytest.fixture
def harness(tmp_path: Path) -> FileHarness:
    return FileHarness(tmp_path)


class TestFileStore(StoreContract):
    pass


def test_a_line_cut_short_by_a_kill_is_dropped_and_the_next_one_is_whole(harness: FileHarness) -> None:
    run_id, store = harness.create(CONFIG), harness.store()
    lease = store.claim(run_id, "w", 60)
    assert lease
    store.append_event(lease, "log", {"n": 1})
    store.put_experiment(lease, experiment("e1"))
    for name in ("events.jsonl", "records.jsonl"):
        with (harness.folder / "runs" / run_id / name).open("a") as handle:
            handle.write('{"seq": 2, "at": 1.0, "ki')
    assert len(harness.store().events(run_id)) == 1
    assert harness.store().append_event(lease, "log", {"n": 2}) == 2
    harness.store().put_experiment(lease, experiment("e2"))
    assert [e["payload"]["n"] for e in harness.store().events(run_id)] == [1, 2]
    assert [e.id for e in harness.store().load(run_id).experiments] == ["e1", "e2"]


def test_events_longer_than_a_read_are_numbered_too(harness: FileHarness) -> None:
    run_id, store = harness.create(CONFIG), harness.store()
    lease = store.claim(run_id, "w", 60)
    assert lease
    assert [store.append_event(lease, "log", {"text": "x" * 200_000}) for _ in range(3)] == [1, 2, 3]


KILLED = """
import sys
from optimizer.file_store import FileStore, worker_name
from tests.contracts.store_contract import experiment
store = FileStore(sys.argv[1])
lease = store.claim(sys.argv[2], worker_name(), 600)
for n in range(10_000):
    store.put_experiment(lease, experiment(f"e{n}"))
    store.append_event(lease, "experiment", {"n": n})
    print(n, flush=True)
"""


def test_a_killed_worker_loses_nothing_it_had_reported_and_its_run_is_free_at_once(harness: FileHarness) -> None:
    run_id = harness.create(CONFIG)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(harness.folder), run_id]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    reported = 0
    while reported < 20:
        reported = int(worker.stdout.readline())
    assert harness.store().claim(run_id, worker_name(), 60) is None, "its lease lives while it does"
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    state, events = harness.store().load(run_id), harness.store().events(run_id)
    assert [e.id for e in state.experiments][: reported + 1] == [f"e{n}" for n in range(reported + 1)]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    lease = harness.store().claim(run_id, worker_name(), 60)
    assert lease is not None and lease.attempt == 2


def test_a_run_id_cannot_name_a_folder_elsewhere(harness: FileHarness) -> None:
    with pytest.raises(KeyError):
        harness.store().load("../../etc")


def test_two_runs_cannot_share_an_id(harness: FileHarness) -> None:
    run_id = harness.create(CONFIG)
    with pytest.raises(FileExistsError):
        harness.store().create(run_id, CONFIG)
