"""A whole search on the tiny model: good, broken and hostile candidates, and a worker that is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.models.config import ModelConfig
from kernels.build import has_compiler
from optimizer import trials
from optimizer.config import RunConfig
from optimizer.export.finish import FINISHER, cleaned
from optimizer.file_store import FileStore, worker_name
from optimizer.records import MEASURED, Candidate, Experiment, State
from optimizer.search import Search
from optimizer.store import RunState
from optimizer.verify import controls, integrity
from tests.optimizer.scripted import BASELINE, SLOW, SMALL, agent_of, behind, data_folder, proposal
from tests.paths import ROOT

EXITS = "import os, sys\nprint('leaving now', file=sys.stderr, flush=True)\nos._exit(7)"
CANDIDATES = [
    proposal("good", {"forward.py": BASELINE}),
    proposal("broken", {"forward.py": BASELINE, "broken.cpp": "this is no C++;\n"}, "projections", "cpp"),
    proposal("exits", {"forward.py": behind("Exits", EXITS)}, "cache"),
    proposal("hangs", {"forward.py": behind("Hangs", "while True:\n    pass")}, "scheduling"),
    proposal("wrong", {"forward.py": behind("Wrong", "return super().__call__(batch, kv).flip(-1)")}, "cache"),
    proposal("unreadable", {"forward.py": "def build(model, settings:\n"}, "projections"),
]


@dataclass(frozen=True)
class Ended:
    report: dict[str, Any]
    state: RunState
    events: list[dict[str, Any]]

    @property
    def proposed(self) -> list[Candidate]:
        """Without the finalists' cleaned sources."""
        return [c for c in self.state.candidates if c.agent != FINISHER]

    def of(self, name: str) -> dict[int, Experiment]:
        """The candidate's experiments by tier."""
        (digest,) = {c.artifact_hash for c in self.proposed if c.name == name}
        return {e.tier: e for e in self.state.experiments if e.artifact_hash == digest}

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [e["payload"] for e in self.events if e["kind"] == kind]


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A search whose baseline computes every step four times, so that the plain program is a sure gain."""
    data = data_folder(tmp_path_factory.mktemp("search"))
    config = RunConfig(str(tiny_model), SMALL.to_json(), str(data), dtype="float32", threads=1, budget_s=90)
    store = FileStore(data)
    store.create(config.run_id, config.to_json())
    lease = store.claim(config.run_id, worker_name(), 60)
    assert lease
    heard: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArtifactStore, "baseline", slow_baseline)
        patch.setattr(trials, "TIER_ONE_LIMIT_S", 3.0)
        patch.setattr(integrity, "SLOWED_LIMIT", 50.0)  # other tests may run beside this one
        patch.setattr(controls, "run", lambda verifier, names, stop_at: dict.fromkeys(names, True))
        agents = [agent_of(p) for p in CANDIDATES]
        report = Search(config, store, lambda kind, payload: heard.append(kind), agents).run(lease)  # type: ignore[arg-type]
    assert report is not None
    events = store.events(config.run_id, limit=100_000)
    assert [e["kind"] for e in events] == heard, "what is told is what is stored"
    return Ended(report, store.load(config.run_id), events)


def slow_baseline(store: ArtifactStore, config: ModelConfig | None = None) -> Artifact:
    return store.put({"forward.py": BASELINE + SLOW}, name="slow baseline", focus="baseline")


def test_a_better_program_is_kept_at_both_tiers_and_wins(ended: Ended) -> None:
    found = ended.of("good")
    assert {tier: e.state for tier, e in found.items()} == {1: State.KEEP, 2: State.KEEP}
    assert all(e.checks_passed and e.samples and not e.failure for e in found.values())
    assert [p["name"] for p in ended.kinds("incumbent")] == ["good"]
    assert ended.report["outcome"] == "succeeded", ended.report["reason"]
    assert ended.report["winner"]["name"] == "good" and ended.report["winner"]["files"] == cleaned(
        {"forward.py": BASELINE}
    )
    speedup = ended.report["speedup"]
    assert speedup["ci_high"] >= speedup["ratio"] >= speedup["ci_low"] > 1
    assert {c["verdict"] for c in ended.report["verification"]} == {"pass"}
    assert {c.verdict.value for c in ended.state.checks} == {"pass"}


@pytest.mark.parametrize(
    ("name", "failure", "log"),
    [
        pytest.param(
            "broken",
            "broken.cpp did not compile: ",
            "error",
            marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler"),
        ),
        ("exits", "exit status 7", "leaving now"),
        ("hangs", "did not answer in time", ""),
        ("wrong", "wrong values: ", ""),
        ("unreadable", "", "SyntaxError"),
    ],
)
def test_a_failed_candidate_has_its_record_with_reason_and_log(ended: Ended, name: str, failure: str, log: str) -> None:
    found = ended.of(name)
    assert list(found) == [1]
    assert found[1].state is State.FAILED and found[1].ratio is None and not found[1].checks_passed
    assert found[1].failure and failure in found[1].failure
    assert log in found[1].log_tail


def test_a_candidates_log_holds_nothing_of_another(ended: Ended) -> None:
    said = {name for name in ("exits", "hangs", "wrong", "unreadable") if "leaving now" in ended.of(name)[1].log_tail}
    assert said == {"exits"}


def test_counts_keep_failures_apart_from_what_was_measured(ended: Ended) -> None:
    counts = ended.report["counts"]
    expected = {"tier1": 1, "tier2": 1, "failed": 5, "predicted": 0, "verified": 1}
    expected |= {"distinct_sources": 1, "foci": 1, "mechanisms": 1}
    assert {name: counts[name] for name in expected} == expected


def test_every_candidate_has_its_proposal_its_estimate_or_failure_and_a_post(ended: Ended) -> None:
    names = {p.name for p in CANDIDATES}
    assert {p.name for p in ended.state.proposals} == names == {c.name for c in ended.proposed}
    estimated = {e.artifact_hash for e in ended.state.estimates}
    assert {c.name for c in ended.proposed if c.artifact_hash not in estimated} == {"broken"}
    posted = {p.artifact_hash for p in ended.state.posts if p.kind != "claim"}
    assert posted == {c.artifact_hash for c in ended.proposed}


def test_the_winner_is_its_cleaned_source_and_its_parent_was_measured(ended: Ended) -> None:
    (final,) = (c for c in ended.state.candidates if c.agent == FINISHER)
    assert ended.report["winner"]["artifact_hash"] == final.artifact_hash
    assert {e.artifact_hash for e in ended.of("good").values()} == {final.parent}
    assert {c.artifact_hash for c in ended.state.checks} == {final.artifact_hash}


def test_events_have_no_gap_and_phases_their_order(ended: Ended) -> None:
    assert [e["seq"] for e in ended.events] == list(range(1, len(ended.events) + 1))
    phases = [p["phase"] for p in ended.kinds("phase")]
    assert phases == ["profile", "search", "verify", "measure", "report"]
    assert ended.events[-1]["kind"] == "finished" and ended.state.report == json.loads(json.dumps(ended.report))


def test_the_report_has_the_fields_that_others_read(ended: Ended) -> None:
    figures = {"isl", "osl", "conc", "tput_per_gpu", "output_tput_per_gpu", "input_tput_per_gpu"}
    figures |= {f"{figure}_{name}" for figure in ("median", "p99") for name in ("ttft", "tpot", "e2el", "intvty")}
    for side in ("baseline", "winner"):
        assert figures <= set(ended.report[side]) and None not in {ended.report[side][name] for name in figures}
    assert ended.report["winner"]["output_tput"] > ended.report["baseline"]["output_tput"] > 0
    assert {"predicted", "tier1", "tier2", "verified", "per_hour"} <= set(ended.report["counts"])
    assert ended.report["swap"]["cold_start_s"] > 0 and ended.report["swap"]["hot_swap_s"] > 0
    assert ended.report["environment"]["torch"] and ended.report["environment"]["threads"] == 1
    assert [s["name"] for s in ended.report["scenarios"]] == ["heldout", "stable", "burst"]
    assert {op["name"] for op in ended.report["operators"]} >= {"attention (decode)", "projections (prefill)"}


def test_what_was_lost_to_hosts_that_died_is_told(ended: Ended) -> None:
    assert "host restarted: a candidate took it down" in {item["why"] for item in ended.report["time_lost"]}


def measured(state: RunState) -> dict[str, float | None]:
    return {e.id: e.ratio for e in state.experiments if e.state in MEASURED}


class Worker:
    """`python -m optimizer` in a process of its own."""

    def __init__(self, data: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "optimizer", "--data", str(data), "--out", str(data / "report.json")]
        self.process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: list[str] = []

    def read_until(self, *words: str, times: int = 1) -> str:
        """The line in which one of `words` was said for the last of so many times."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.said.append(line)
            times -= any(word in line for word in words)
            if not times:
                return line
        raise AssertionError("".join(self.said))

    def end(self, number: int) -> int:
        """Its exit status after this signal; all of its processes have ended."""
        hosts = [os.pidfd_open(pid) for pid in children(self.process.pid)]
        assert hosts, "an engine host runs beside it"
        self.process.send_signal(number)
        assert self.process.stdout
        self.said += self.process.stdout.readlines()
        status = self.process.wait(60)
        for host in hosts:
            assert select.select([host], [], [], 30)[0], "a host outlived its worker"
            os.close(host)
        return status


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Starts workers; none outlives the test."""
    workers: list[Worker] = []

    def begin(data: Path, *arguments: str) -> Worker:
        workers.append(Worker(data, *arguments))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        assert worker.process.stdout
        worker.process.stdout.close()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_killed_worker_loses_nothing_it_measured_and_repeats_nothing(
    tiny_model: Path, tmp_path: Path, start: Callable[..., Worker]
) -> None:
    data = data_folder(tmp_path / "data")
    traffic = tmp_path / "small.json"
    traffic.write_text(json.dumps(SMALL.to_json()))
    options = ["--model", str(tiny_model), "--traffic", str(traffic), "--budget", "119s", "--foci", "attention,cache"]
    first = start(data, *options, "--dtype", "float32", "--threads", "1")
    run_id = first.read_until("Run ").split()[1].rstrip(".")
    first.read_until("tier 1", times=2)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    store = FileStore(data)
    before = store.load(run_id)
    assert len(measured(before)) >= 2
    pending = {p.id for p in before.proposals} - {c.proposal_id for c in before.candidates}

    second = start(data, "--resume", run_id)
    second.read_until("Resumed: ")
    second.read_until("tier 1", times=2)
    assert second.end(signal.SIGTERM) == 130
    after = store.load(run_id)
    assert measured(before).items() <= measured(after).items()
    assert len(measured(after)) >= len(measured(before)) + 2
    written = [json.loads(line) for line in (data / "runs" / run_id / "records.jsonl").read_text().splitlines()]
    times = Counter(line["data"]["id"] for line in written if line["kind"] == "experiments")
    assert set(times.values()) == {1}, "an experiment was measured twice"
    names = Counter(p.name for p in after.proposals)
    assert set(names.values()) == {1}, "a program was proposed twice"
    if pending:
        assert pending & {c.proposal_id for c in after.candidates}, "what was claimed goes first"
    assert after.phase == "cancelled" and after.elapsed_s > before.elapsed_s
    events = store.events(run_id, limit=100_000)
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert store.claim(run_id, worker_name(), 10) is None, "the run has ended"
