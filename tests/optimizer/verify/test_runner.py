"""A finalist's verification as a whole: what it tells, when it stops, and what counts as verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.models.config import ModelConfig
from optimizer.ledger import Cancelled, passed
from optimizer.records import Check, Verdict
from optimizer.verify import contamination, controls, integrity, serving
from optimizer.verify.bench import Bench
from optimizer.verify.faults import CONTROLS, Fault
from optimizer.verify.runner import Verifier
from tests.optimizer.conftest import rewritten

CLOCKED = ("baseline speed", "idle", "physical floor")  # depend on what else the machine does

EXITS = """

class Exits(Forward):
    calls = 0

    def __call__(self, batch, kv):
        self.calls += 1
        if self.calls > 3:
            import os, sys
            print("leaving now", file=sys.stderr, flush=True)
            os._exit(7)
        return super().__call__(batch, kv)


def build(model, settings):
    return Exits(model, settings)
"""
RAISES = """

class Raises(Forward):
    def __call__(self, batch, kv):
        if (batch.context_len % 16 == 0).any():
            raise RuntimeError("an edge I forgot")
        return super().__call__(batch, kv)


def build(model, settings):
    return Raises(model, settings)
"""


@pytest.fixture
def verifier(
    tiny_model: Path,
    tiny_config: ModelConfig,
    baseline: Artifact,
    artifacts: ArtifactStore,
    text: tuple[int, ...],
    tmp_path: Path,
) -> Verifier:
    return Verifier(tiny_model, tiny_config, "float32", 1, baseline, artifacts, text, tmp_path, floor_s=1e-9)


def row(verdict: Verdict, check: str = "poison") -> Check:
    return Check("a" * 64, check, "contamination", "case", 0.0, 0.0, "", verdict)


def test_the_baselines_own_program_is_verified(verifier: Verifier, twin: Artifact) -> None:
    told: list[Check] = []
    verifier.on_checks, verifier.control_caught = told.extend, {"poison": True, "repeats": False}
    checks = verifier.verify(twin)
    assert [c for c in checks if c.verdict is not Verdict.PASS and c.check not in CLOCKED] == []
    assert passed([c for c in checks if c.check not in CLOCKED])
    ran = {c.check for c in checks}
    assert ran == set(controls.applicable(verifier)) - {"exactness"}, "exactness is of another tolerance"
    assert told == checks, "everything was told as it came"
    assert {c.check: c.control_caught for c in checks if c.check in ("poison", "repeats", "abort")} == {
        "poison": True,
        "repeats": False,
        "abort": None,
    }


def test_a_candidate_that_ends_its_process_fails_with_its_reason(
    verifier: Verifier, artifacts: ArtifactStore, baseline: Artifact
) -> None:
    checks = verifier.verify(rewritten(artifacts, baseline, "exits", EXITS))
    assert checks[-1].verdict is Verdict.FAIL and checks[-1].check in contamination.CHECKS
    assert checks[-1].family == "contamination"
    assert "leaving now" in checks[-1].detail, "the log's end says why"
    assert not passed(checks)


HANGS = EXITS.replace("os._exit(7)", "exec('while True: pass')")
HOARDS = EXITS.replace("os._exit(7)", "self.kept = [torch.ones(1 << 22) for _ in range(10_000)]")


def test_a_candidate_that_hangs_fails_and_its_host_is_ended(
    verifier: Verifier, artifacts: ArtifactStore, baseline: Artifact
) -> None:
    checks = replace(verifier, limit_s=2.0).verify(rewritten(artifacts, baseline, "hangs", HANGS))
    assert checks[-1].verdict is Verdict.FAIL and "did not answer in time" in checks[-1].detail
    assert len(checks) < len(contamination.CHECKS), "nothing is asked of a host that is gone"


def test_a_candidate_that_hoards_memory_fails_and_its_host_is_ended(
    verifier: Verifier, artifacts: ArtifactStore, baseline: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.client._physical_memory", lambda: 2 << 30)
    checks = verifier.verify(rewritten(artifacts, baseline, "hoards", HOARDS))
    assert checks[-1].verdict is Verdict.FAIL and "grew past 1.3 GB" in checks[-1].detail


def test_a_candidate_that_raises_fails_those_checks_and_the_others_go_on(
    verifier: Verifier, artifacts: ArtifactStore, baseline: Artifact
) -> None:
    checks = verifier.verify(rewritten(artifacts, baseline, "raises", RAISES))
    failed = {c.check: c for c in checks if c.verdict is Verdict.FAIL and c.check not in CLOCKED}
    assert "an edge I forgot" in failed["poison"].detail
    assert "boundary lengths" in failed and "constant output" not in failed
    assert {c.check for c in checks} >= {"weights kept", "proof of application"}
    assert not passed(checks)


def test_a_host_that_does_not_start_fails_the_verification(verifier: Verifier, twin: Artifact, tmp_path: Path) -> None:
    checks = replace(verifier, model=tmp_path / "nowhere").verify(twin)
    assert [c.verdict for c in checks] == [Verdict.FAIL] and checks[0].check == "verification"
    assert checks[0].detail


def test_a_person_can_stop_it_between_checks(verifier: Verifier, twin: Artifact) -> None:
    told: list[Check] = []
    verifier.on_checks = told.extend

    def between() -> None:
        if told:
            raise Cancelled

    verifier.between = between
    with pytest.raises(Cancelled):
        verifier.verify(twin)
    assert {c.check for c in told} == {"poison"}


@pytest.mark.parametrize(
    ("verdicts", "verified"),
    [
        ([], False),
        ([Verdict.PASS], True),
        ([Verdict.PASS, Verdict.NOT_APPLICABLE], True),
        ([Verdict.NOT_APPLICABLE], False),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], False),
        ([Verdict.PASS, Verdict.FAIL], False),
    ],
)
def test_only_passes_make_a_pass(verdicts: list[Verdict], verified: bool) -> None:
    assert passed([row(v) for v in verdicts]) is verified


def test_a_control_says_whether_its_own_check_caught_it(
    verifier: Verifier, host: HostClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert controls.check(verifier, host, None, "neighbours") is True

    def blind(bench: Bench) -> list[Check]:
        bench.rig.play(bench.script([5]))
        return [row(Verdict.PASS, "neighbours"), row(Verdict.FAIL, "another")]

    monkeypatch.setitem(contamination.CHECKS, "neighbours", blind)
    assert controls.check(verifier, host, None, "neighbours") is False


def test_a_planted_fault_that_merely_crashes_was_not_caught(
    verifier: Verifier, host: HostClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = Fault("crashes", "    def __call__(self, batch, kv):\n        raise RuntimeError('not what was planted')\n")
    monkeypatch.setitem(controls.CONTROLS, "neighbours", crash)
    assert controls.check(verifier, host, None, "neighbours") is False


def test_every_check_catches_its_planted_fault(verifier: Verifier) -> None:
    """As a run does it: hosts shared where the faults allow it."""
    names = sorted(set(controls.applicable(verifier)) - set(CLOCKED))
    assert controls.run(verifier, names) == dict.fromkeys(names, True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for the running of controls: what was asked for, each time."""
    asked: list[list[str]] = []

    def run(verifier: Verifier, names: list[str], stop_at: float = float("inf")) -> dict[str, bool]:
        asked.append(names)
        return {name: name != "idle" for name in names if stop_at > 0 or name == "poison"}

    monkeypatch.setattr(controls, "run", run)
    return asked


def test_controls_run_once_for_a_machine_and_model(
    verifier: Verifier, tmp_path: Path, counted: list[list[str]]
) -> None:
    assert controls.known(verifier, tmp_path) == {}
    found = controls.caught(verifier, tmp_path)
    assert set(found) <= set(CONTROLS) and found["idle"] is False and found["poison"] is True
    assert controls.caught(verifier, tmp_path) == found == controls.known(verifier, tmp_path)
    assert len(counted) == 1
    marked = controls.mark([row(Verdict.PASS), row(Verdict.PASS, "idle"), row(Verdict.PASS, "new")], found)
    assert [c.control_caught for c in marked] == [True, False, None]


def test_controls_that_time_left_undone_are_tried_next_time(
    verifier: Verifier, tmp_path: Path, counted: list[list[str]]
) -> None:
    assert controls.caught(verifier, tmp_path, stop_at=0) == {"poison": True}
    assert set(controls.caught(verifier, tmp_path)) == {"poison", *counted[1]}
    assert "poison" not in counted[1]


def test_controls_of_another_baseline_are_run_anew(
    verifier: Verifier, twin: Artifact, tmp_path: Path, counted: list[list[str]]
) -> None:
    controls.caught(verifier, tmp_path)
    controls.caught(replace(verifier, baseline=twin), tmp_path)
    assert len(counted) == 2
    assert len(json.loads((tmp_path / controls.FILE).read_text())) == 2


def test_a_damaged_record_of_controls_costs_a_new_run_only(
    verifier: Verifier, tmp_path: Path, counted: list[list[str]]
) -> None:
    (tmp_path / controls.FILE).write_text('{"half')
    assert controls.caught(verifier, tmp_path)
    assert len(counted) == 1


def test_the_order_is_contamination_integrity_quality(verifier: Verifier) -> None:
    ((even, checkers),) = verifier._rounds()
    names = [name for name, _ in checkers]
    assert not even, "without experts one host serves all"
    assert names[: len(contamination.CHECKS)] == list(contamination.CHECKS)
    assert set(serving.CHECKS) | set(integrity.CHECKS) <= set(names)
    assert names[-1] == "distance from float32"
