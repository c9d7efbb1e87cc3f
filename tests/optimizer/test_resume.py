"""A run that is killed in mid-search, gone on with, and carried through to its report: on real hosts and the real command."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from optimizer.file_store import FileStore
from optimizer.records import MEASURED, State
from tests.optimizer.scripted import SMALL, data_folder
from tests.paths import ROOT

BUDGET = "20s"
LIMIT_S = 120
KILLS = 10


def command(folder: Path, *more: str) -> list[str]:
    fixed = ["--data", str(folder / "data"), "--out", str(folder / "report.json")]
    return [sys.executable, "-m", "optimizer", *fixed, *more]


@pytest.mark.timeout(300)
def test_a_killed_run_goes_on_and_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    data_folder(tmp_path / "data")
    traffic = tmp_path / "small.json"
    traffic.write_text(json.dumps(SMALL.to_json()))
    asked = ["--model", str(tiny_model), "--traffic", str(traffic), "--dtype", "float32", "--threads", "1"]
    first = subprocess.Popen(
        command(tmp_path, *asked, "--budget", BUDGET),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    found = re.search(r"--resume (\w+)", first.stdout.readline() + first.stdout.readline())
    assert found
    run, store = found[1], FileStore(tmp_path / "data")
    try:
        before = measured(store, run)
        deadline = time.monotonic() + LIMIT_S
        while not before:  # what does the same is measured once: there is little to measure on the tiny model
            assert first.poll() is None and time.monotonic() < deadline, "it ended before it was killed"
            time.sleep(0.1)
            before = measured(store, run)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        first.stdout.close()

    second = subprocess.run(
        command(tmp_path, "--resume", run), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert second.returncode == 0, second.stdout + second.stderr
    after = measured(store, run)
    assert before.items() <= after.items(), "a measured candidate was lost or measured again"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run_id"] == run and report["outcome"] in ("succeeded", "no_gain")
    assert store.load(run).report == report
    assert report["counts"]["tier1"] >= len({key[0] for key in before})


def measured(store: FileStore, run: str) -> dict[tuple[str, int, int], str]:
    """What was measured so far, by artefact and tier."""
    rows = store.load(run).experiments
    return {
        (e.artifact_hash, e.tier, e.visit): json.dumps(asdict(e), sort_keys=True)
        for e in rows
        if State(e.state) in MEASURED
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_ten_random_moments_it_measures_nothing_twice_and_loses_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    data_folder(tmp_path / "data")
    traffic = tmp_path / "small.json"
    traffic.write_text(json.dumps(SMALL.to_json()))
    asked = ["--model", str(tiny_model), "--traffic", str(traffic), "--dtype", "float32", "--threads", "1"]
    seed = int.from_bytes(os.urandom(4))
    rng, store = random.Random(seed), FileStore(tmp_path / "data")
    arguments, run, before, leader = [*asked, "--budget", "20m"], "", {}, ""
    for _ in range(KILLS):
        process = start(tmp_path, *arguments)
        assert process.stdout is not None
        run = run or re.search(r"Run (\w+)", process.stdout.readline())[1]  # type: ignore[index]
        arguments = ["--resume", run]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.5, 15.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        after = measured(store, run)
        assert before.items() <= after.items(), f"lost or changed, seed {seed}"
        leads = [e.artifact_hash for e in store.load(run).experiments if e.leads]
        assert leader in ("", *leads), f"the incumbent was lost, seed {seed}"
        before, leader = after, leads[-1] if leads else ""
    lines = (tmp_path / "data" / "runs" / run / "records.jsonl").read_bytes().split(b"\n")[:-1]
    rows = [json.loads(line) for line in lines]
    for kind in ("experiments", "proposals"):
        times = Counter(row["data"]["id"] for row in rows if row["kind"] == kind)
        assert set(times.values()) <= {1}, f"{kind} twice, seed {seed}"
    assert len(before) >= 3, "it came on between the kills"
    behaviours = Counter(
        row["data"]["behaviour"]
        for row in rows
        if row["kind"] == "experiments" and row["data"]["tier"] == 1 and row["data"]["visit"] == 1
        and row["data"]["state"] in MEASURED and row["data"]["behaviour"]
    )  # fmt: skip
    assert set(behaviours.values()) <= {1}, f"one program under two names was measured twice, seed {seed}"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
