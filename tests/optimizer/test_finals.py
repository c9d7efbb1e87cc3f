"""The end of a run: the first finalist that is verified and served is measured; anything less ends calmly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import ArtifactStore
from optimizer import finals as finals_module
from optimizer.agents.base import Tried
from optimizer.builder import Builder, describe
from optimizer.config import Budget, RunConfig
from optimizer.file_store import FileStore
from optimizer.finals import MAX_FINALISTS, Finals
from optimizer.lab import Scene
from optimizer.ledger import Cancelled, Ledger
from optimizer.measure.end_to_end import EndToEnd, Job, Scenario
from optimizer.measure.samples import LoadResult, RequestSample
from optimizer.measure.servers import MeasureFailed
from optimizer.measure.stats import paired_ratio
from optimizer.records import Check, Experiment, State, Verdict
from optimizer.traffic.profile import TrafficProfile
from tests.optimizer.scripted import SMALL, proposal, scene_of
from tests.optimizer.test_session import ScriptedLab


def check(verdict: Verdict, name: str = "poison") -> Check:
    return Check("a" * 64, name, "contamination", "NaN in free blocks", 3.0, 0.0, "values that differ", verdict)


def window(side: str, tput: float) -> LoadResult:
    samples = [RequestSample(i, 0.0, 0.0, 0.1, (0.1,) * 7, 0.8, 12, 8, 200, version=side) for i in range(2)]
    return LoadResult(tuple(samples), 16 / tput, 2)


def scenario(name: str, ratio: float, spread: float = 0.01) -> Scenario:
    ratios = [ratio * (1 - spread), ratio, ratio * (1 + spread)]
    windows = {"baseline": tuple(window("baseline", 10.0) for _ in ratios)}
    windows["winner"] = tuple(window("winner", 10.0 * r) for r in ratios)
    return Scenario(name, "2 users", 2, paired_ratio(ratios), windows)


def measured(ratio: float = 1.4, spread: float = 0.01) -> EndToEnd:
    scenarios = tuple(scenario(name, ratio, spread) for name in ("heldout", "stable", "burst"))
    return EndToEnd(
        scenarios, (scenarios[1],), {"baseline": 3.0, "winner": 3.2}, {"winner": 3_000_000_000}, 0.0, (), 9.0
    )


class Harness:
    """Finals whose verifier and measurement answer by script."""

    def __init__(self, folder: Path, model: Path, scene: Scene) -> None:
        self.config = RunConfig(str(model), SMALL.to_json(), str(folder), dtype="float32", threads=1, budget_s=60)
        self.store = FileStore(folder)
        self.store.create(self.config.run_id, self.config.to_json())
        lease = self.store.claim(self.config.run_id, "worker", 60)
        assert lease
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.ledger = Ledger(self.config, self.store, lease, lambda kind, payload: self.heard.append((kind, payload)))
        self.scene, self.artifacts = scene, ArtifactStore(folder)
        self.lab = ScriptedLab(self.config, self.scene, self.ledger, self.artifacts)
        self.lab.operators, self.lab.steps, self.lab.floor_s = {}, {}, 0.0  # type: ignore[attr-defined]
        self.checks: dict[str, list[Check]] = {}
        self.answers: dict[str, EndToEnd | MeasureFailed] = {}
        self.verified: list[str] = []
        self.jobs: list[Job] = []

    def finalist(self, name: str) -> Tried:
        p = proposal(name, {"forward.py": f"def {name}(): ...\n"})
        artifact = Builder(Path(self.config.data_dir)).store(p)
        experiment = Experiment("e", artifact.hash, 2, State.KEEP, "b", True, 1.4, 1.3, 1.5)
        return Tried(describe(p, artifact, 0.1), experiment)

    def conclude(self, *names: str) -> dict[str, Any]:
        finals = Finals(self.config, Budget(60), self.scene, self.lab, self.ledger)  # type: ignore[arg-type]
        return finals.conclude([self.finalist(name) for name in names])

    def logs(self) -> str:
        return "\n".join(payload["text"] for kind, payload in self.heard if kind == "log")

    def phases(self) -> list[str]:
        return [payload["phase"] for kind, payload in self.heard if kind == "phase"]


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of(tiny_model, tmp_path_factory.mktemp("scene"))


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    harness = Harness(tmp_path, tiny_model, scene)

    class ScriptedVerifier:
        control_caught: dict[str, bool] = {}

        def __init__(self, on_checks: Any, **given: Any) -> None:
            self.on_checks = on_checks

        def verify(self, artifact: Any) -> list[Check]:
            harness.verified.append(artifact.manifest.name)
            found = harness.checks.get(artifact.manifest.name, [check(Verdict.PASS)])
            self.on_checks(found)
            return found

    def measure(job: Job, on_pair: Any) -> EndToEnd:
        harness.jobs.append(job)
        name = harness.artifacts.get(job.winner.name).manifest.name
        on_pair("heldout", 1, 3, 1.4)
        answer = harness.answers.get(name, measured())
        if isinstance(answer, MeasureFailed):
            raise answer
        return answer

    monkeypatch.setattr(finals_module, "Verifier", ScriptedVerifier)
    monkeypatch.setattr(finals_module, "measure_end_to_end", measure)
    monkeypatch.setattr(finals_module.controls, "known", lambda verifier, data_dir: {})
    monkeypatch.setattr(finals_module.controls, "caught", lambda verifier, data_dir, stop_at: {"poison": True})
    yield harness


def test_without_a_finalist_the_end_is_calm(run: Harness) -> None:
    report = run.conclude()
    assert report["outcome"] == "no_gain" and report["speedup"] is None and report["winner"] is None
    assert report["reason"].startswith("The time was up before any candidate was measured")
    assert run.phases() == ["report"] and run.jobs == []


def test_no_gain_of_those_measured_is_told_as_that(run: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = run.ledger.counts() | {"tier1": 3}
    monkeypatch.setattr(run.ledger, "counts", lambda: counts)
    assert run.conclude()["reason"].startswith("No candidate beat the baseline by more than the noise")


def test_the_first_that_is_verified_is_measured_and_wins(run: Harness) -> None:
    report = run.conclude("first", "second")
    assert report["outcome"] == "succeeded" and report["winner"]["name"] == "first"
    assert report["speedup"]["ratio"] == pytest.approx(1.4, rel=1e-3)
    assert run.verified == ["first"] and run.phases() == ["verify", "measure", "report"]
    assert run.jobs[0].baseline == run.lab.baseline.path and run.jobs[0].budget_s >= 10
    assert ("end_to_end", {"scenario": "heldout", "pair": 1, "of": 3, "ratio": 1.4}) in run.heard
    assert report["counts"]["verified"] == 1


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_what_is_not_verified_gives_way_to_the_next_and_says_why(run: Harness, verdict: Verdict) -> None:
    run.checks["first"] = [check(Verdict.PASS), check(verdict, "neighbours")]
    report = run.conclude("first", "second")
    assert report["winner"]["name"] == "second" and run.verified == ["first", "second"]
    assert "first was not verified: neighbours, NaN in free blocks" in run.logs()
    assert report["counts"]["verified"] == 1
    assert {c.check for c in run.store.load(run.config.run_id).checks} == {"poison", "neighbours"}


def test_a_verification_without_checks_verifies_nothing(run: Harness) -> None:
    run.checks["first"] = []
    report = run.conclude("first")
    assert report["outcome"] == "no_gain" and "first" in report["reason"] and run.jobs == []
    assert "no check ran" in run.logs()


def test_so_many_finalists_are_tried_and_no_more(run: Harness) -> None:
    names = [f"idea{i}" for i in range(MAX_FINALISTS + 2)]
    run.checks |= {name: [check(Verdict.FAIL)] for name in names}
    report = run.conclude(*names)
    assert run.verified == names[:MAX_FINALISTS]
    assert report["outcome"] == "no_gain" and names[0] in report["reason"] and report["counts"]["verified"] == 0


def test_a_winner_that_cannot_be_served_gives_way_to_the_next(run: Harness) -> None:
    run.answers["first"] = MeasureFailed("winner", "The winner's server ended with code 1.")
    report = run.conclude("first", "second")
    assert report["winner"]["name"] == "second"
    assert "first could not be served: The winner's server ended with code 1." in run.logs()


def test_a_baseline_that_cannot_be_served_is_no_result(run: Harness) -> None:
    run.answers["first"] = MeasureFailed("baseline", "The baseline's server ended with code 1.")
    with pytest.raises(MeasureFailed, match="The baseline's server"):
        run.conclude("first", "second")
    assert run.verified == ["first"]


@pytest.mark.parametrize(("ratio", "spread"), [(0.9, 0.01), (1.2, 0.3)])
def test_a_gain_that_is_not_sure_end_to_end_is_none(run: Harness, ratio: float, spread: float) -> None:
    run.answers["first"] = measured(ratio, spread)
    report = run.conclude("first")
    assert report["outcome"] == "no_gain" and report["winner"] is None and report["speedup"] is None
    assert "no sure gain. The baseline stays." in report["reason"] and "first gave" in report["reason"]


def test_checks_say_whether_their_planted_fault_was_caught_here(run: Harness) -> None:
    run.checks["first"] = [check(Verdict.PASS), check(Verdict.PASS, "idle")]
    report = run.conclude("first")
    assert {c["check"]: c["control_caught"] for c in report["verification"]} == {"poison": True, "idle": None}
    stored = {c.check: c.control_caught for c in run.store.load(run.config.run_id).checks}
    assert stored == {"poison": True, "idle": None}
    assert any("Not shown in this run" in line and "idle" in line for line in report["limits"])


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (SMALL, "the traffic does not say how its requests sample: they are greedy, which flatters drafts"),
        (SMALL.sampled(0.7, 0.95), "requests sample at temperature 0.7, top-p 0.95"),
    ],
)
def test_the_report_says_how_requests_sampled(run: Harness, profile: TrafficProfile, says: str) -> None:
    run.config = replace(run.config, traffic=profile.to_json())
    report = run.conclude("first")
    assert report["traffic"]["sampling"] == says
    assert f"{says[0].upper()}{says[1:]}." in report["limits"]


def test_a_person_can_stop_it_between_pairs(run: Harness) -> None:
    run.ledger._cancelled = True
    with pytest.raises(Cancelled):
        run.conclude("first")


def test_a_winner_over_the_memory_limit_is_refused(run: Harness) -> None:
    run.config = replace(run.config, max_memory_bytes=2_000_000_000)
    report = run.conclude("large")
    assert report["outcome"] == "no_gain" and "keeps 3.00 GB resident and the run allows 2.00 GB" in run.logs()


def test_a_winner_within_the_memory_limit_wins(run: Harness) -> None:
    run.config = replace(run.config, max_memory_bytes=4_000_000_000)
    report = run.conclude("fits")
    assert report["memory"] == {"limit_bytes": 4_000_000_000, "winner_bytes": 3_000_000_000}


def test_the_report_says_what_the_ratio_is_of_and_advises_a_point(run: Harness) -> None:
    run.config = replace(run.config, objective="ttft")
    report = run.conclude("quick")
    assert report["objective"]["name"] == "ttft" and "speed to the first token" in report["reason"]
    assert run.jobs[0].objective.name == "ttft" and report["speedup"]["metric"] == "median_ttft"
    assert report["recommended"]["side"] == "winner" and report["frontier"]
