"""Agents that think long: the engine never waits for them, and they hear of everything between two thoughts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import Artifact, ArtifactStore
from optimizer.agents.base import SearchView
from optimizer.config import Budget, RunConfig
from optimizer.cost.fitted import CostModel
from optimizer.cost.roofline import Workload
from optimizer.file_store import FileStore
from optimizer.lab import Scene
from optimizer.ledger import Ledger
from optimizer.measure.stats import paired_ratio
from optimizer.measure.tiers import Measured
from optimizer.records import Candidate, Experiment, Proposal, State
from optimizer.session import Session
from optimizer.thinking import Thinker
from tests.optimizer.scripted import SMALL, proposal, scene_of

PARTS = {"projections": 0.6, "attention": 0.3, "cache": 0.1}
STEP = {"decode": 1.0, "prefill": 1.0}
THOUGHT_S, TRIAL_S, SEARCH_S = 20.0, 0.5, 200.0


class Clock:
    """Moves when it is told to; whoever sleeps on it wakes when it has come so far."""

    def __init__(self) -> None:
        self.now, self._moved = 0.0, threading.Condition()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        with self._moved:
            self.now += seconds
            self._moved.notify_all()
        time.sleep(0.001)  # for whoever wakes to take note

    def sleep(self, seconds: float) -> None:
        with self._moved:
            end = self.now + seconds
            self._moved.wait_for(lambda: self.now >= end)


class TableLab:
    """A recorded landscape: every program has its speed, and a trial moves the clock on."""

    def __init__(self, scene: Scene, artifacts: ArtifactStore, clock: Clock) -> None:
        self.scene, self.artifacts, self.clock = scene, artifacts, clock
        self.baseline = artifacts.baseline()
        self.work = Workload(2, 20, 8, 20, STEP, {phase: PARTS for phase in STEP})
        self.cost = CostModel(self.work, {phase: dict.fromkeys(PARTS, 0.0) for phase in STEP})

    def shares(self) -> dict[str, dict[str, float]]:
        return {phase: PARTS for phase in STEP}

    def tier_one(
        self,
        artifact: Artifact,
        incumbent: Artifact | None,
        timeout_s: float,
        earlier: Sequence[float] = (),
        judge: Callable[[str], None] = lambda behaviour: None,
    ) -> Measured:
        self.clock.advance(TRIAL_S)
        against = (incumbent or self.baseline).hash
        return Measured(paired_ratio([0.8, 0.81, 0.79]), State.DISCARD, TRIAL_S, against=against)

    def tier_two(self, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        raise AssertionError("nothing here beats the baseline")

    def keep(self, *hashes: str) -> None: ...


class Quick:
    def __init__(self) -> None:
        self.name, self.focus, self.made = "quick", "attention", 0

    def propose(self, view: SearchView) -> Proposal | None:
        self.made += 1
        idea = proposal(f"quick{self.made}", {"forward.py": f"def quick{self.made}(): ...\n"})
        return replace(idea, agent=self.name)

    def told(self, candidate: Candidate, experiment: Experiment) -> None: ...

    def limits(self, view: SearchView) -> list[str]:
        return []


class Ponders(Quick):
    def __init__(self, sleep: Callable[[float], None], thinks: bool) -> None:
        super().__init__()
        self.name, self.sleep, self.thinks = "ponders", sleep, thinks
        self.heard: list[tuple[str, str]] = []  # (candidate, thread)

    def propose(self, view: SearchView) -> Proposal | None:
        self.sleep(THOUGHT_S)
        self.made += 1
        idea = proposal(f"deep{self.made}", {"forward.py": f"def deep{self.made}(): ...\n"})
        return replace(idea, agent=self.name)

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        self.heard.append((candidate.name, threading.current_thread().name))


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of(tiny_model, tmp_path_factory.mktemp("scene"))


@pytest.fixture
def searched(tiny_model: Path, tmp_path: Path, scene: Scene) -> Iterator[Callable[..., Ledger]]:
    def search(clock: Clock, *agents: Any) -> Ledger:
        config = RunConfig(str(tiny_model), SMALL.to_json(), str(tmp_path), dtype="float32", threads=1, budget_s=1e4)
        store = FileStore(tmp_path)
        store.create(config.run_id, config.to_json())
        lease = store.claim(config.run_id, "worker", 60)
        assert lease
        with Ledger(config, store, lease, clock=clock) as ledger:
            lab = TableLab(scene, ArtifactStore(tmp_path), clock)
            session = Session(config, agents, Budget(config.budget_s), ledger, lab)
            session.pause = clock.advance
            session.time_left = lambda: SEARCH_S - clock.now  # type: ignore[method-assign]
            session.search()
        return ledger

    yield search


def test_the_engine_works_while_an_agent_thinks(searched: Callable[..., Ledger]) -> None:
    clock = Clock()
    agent = Ponders(clock.sleep, thinks=True)
    ledger = searched(clock, agent, Quick())
    assert ledger.utilisation >= 0.9
    assert agent.made >= 5, "and it comes to what it thinks of"
    measured = {c.name for c in ledger.candidates.values()}
    assert {"deep1", "deep2", "deep3"} <= measured
    assert agent.heard and {thread for _, thread in agent.heard} == {"agent ponders"}, "it hears in its own thread"
    assert "quick1" in {name for name, _ in agent.heard}


def test_an_agent_that_thinks_inline_is_seen_in_the_utilisation(searched: Callable[..., Ledger]) -> None:
    clock = Clock()
    ledger = searched(clock, Ponders(clock.advance, thinks=False), Quick())
    assert ledger.utilisation < 0.5 and ledger.lost["agents proposing"] > 100


def test_alone_it_is_waited_for(searched: Callable[..., Ledger]) -> None:
    clock = Clock()
    agent = Ponders(clock.sleep, thinks=True)
    ledger = searched(clock, agent)
    assert agent.made >= 3 and ledger.lost["agents thinking"] > 100


def test_a_fault_costs_the_thought_and_silence_lasts_until_something_is_told() -> None:
    news = threading.Event()

    class Fails(Quick):
        def propose(self, view: SearchView) -> Proposal | None:
            self.made += 1
            raise RuntimeError("no answer")

    thinker = Thinker(agent := Fails(), news)
    thinker.think(SearchView())
    assert news.wait(10) and thinker.failure == "RuntimeError: no answer" and thinker.collect() == []
    thinker.think(SearchView())
    assert agent.made == 1
    thinker.told(None, None)  # type: ignore[arg-type]
    thinker.think(SearchView())
    assert thinker._thread is not None
    thinker._thread.join(10)
    assert agent.made == 2
