"""Tier 2 is put off for what is far slower than what waits, and given up once a faster program was confirmed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.artifacts import ArtifactStore
from optimizer.builder import Built, describe
from optimizer.measure.stats import paired_ratio
from optimizer.measure.tiers import Measured
from optimizer.records import Estimate, State
from optimizer.times import Times
from optimizer.trials import LATE_S, Trials
from tests.optimizer.scripted import proposal

SURE = Estimate("", 1.0, 1.0, 1.0, "fitted")


class Ledger(Times):
    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.experiment = self.swap = self.incumbent = lambda *given: None  # type: ignore[assignment]


class Bench:
    """Trials on a lab that answers with the speed named, and asks down what was asked."""

    def __init__(self, folder: Path) -> None:
        self.artifacts, self.asked = ArtifactStore(folder), []
        self.promised, self.left_s = 0.0, 100.0
        self.speeds: dict[str, float] = {}
        lab: Any = SimpleNamespace(
            baseline=self.artifacts.baseline(), artifacts=self.artifacts, tier_one=self.one, tier_two=self.two,
            keep=lambda *hashes: None,
        )  # fmt: skip
        self.trials = Trials(Ledger(), lab, lambda: self.left_s)  # type: ignore[arg-type]
        self.trials.promise = lambda: self.promised

    def measure(self, name: str, speed: float) -> None:
        self.speeds[name] = speed
        idea = proposal(name, {"forward.py": f"def {name}(): ...\n"})
        artifact = self.artifacts.put(idea.files, name=name)
        self.trials.measure(Built(describe(idea, artifact, 0.0), artifact), SURE)

    def go_on(self) -> None:
        self.trials.measure(*self.trials.next_due())

    def one(self, artifact: Any, incumbent: Any, *rest: Any) -> Measured:
        return self._answer(1, artifact, incumbent)

    def two(self, artifact: Any, incumbent: Any) -> Measured:
        return self._answer(2, artifact, None)

    def _answer(self, tier: int, artifact: Any, incumbent: Any) -> Measured:
        name = artifact.manifest.name
        self.asked.append((tier, name))
        ratio = self.speeds[name] / (self.speeds[incumbent.manifest.name] if incumbent else 1.0)
        state = State.KEEP if ratio > 1 else State.DISCARD
        against = (incumbent or self.artifacts.baseline()).hash
        return Measured(
            paired_ratio([ratio * 0.99, ratio, ratio * 1.01]), state, 0.1, against=against, beats=State.KEEP
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_is_outshone_waits_and_a_faster_incumbent_spares_it(bench: Bench) -> None:
    bench.promised = 4.0
    bench.measure("modest", 1.3)
    assert bench.asked == [(1, "modest")] and not bench.trials.due(idle=False)
    bench.measure("fast", 3.0)
    assert bench.asked[1:] == [(1, "fast"), (2, "fast")]
    assert not bench.trials.due(idle=True)


def test_it_is_confirmed_once_nothing_promises_more(bench: Bench) -> None:
    bench.promised = 4.0
    bench.measure("modest", 1.3)
    bench.measure("better", 1.4)
    bench.promised = 1.5
    assert bench.trials.due(idle=False)
    bench.go_on()
    assert bench.asked[-1] == (2, "better"), "the fastest first"
    assert not bench.trials.due(idle=True), "the other was slower"


@pytest.mark.parametrize(("left_s", "idle"), [(100.0, True), (LATE_S - 1, False)])
def test_it_is_confirmed_when_there_is_nothing_else_to_do_or_little_time(
    bench: Bench, left_s: float, idle: bool
) -> None:
    bench.promised = 4.0
    bench.measure("modest", 1.3)
    bench.left_s = left_s
    assert bench.trials.due(idle)
    bench.go_on()
    assert bench.asked[-1] == (2, "modest") and bench.trials.incumbent is not None
