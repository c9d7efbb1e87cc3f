"""Agents that think long: the engine never waits for them, and they hear of everything between two thoughts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import ArtifactStore
from engine.models.config import read_config
from optimizer.agents.base import SearchView
from optimizer.config import Budget, RunConfig
from optimizer.file_store import FileStore
from optimizer.ledger import Ledger
from optimizer.records import Candidate, Experiment, Proposal
from optimizer.session import Session
from optimizer.thinking import Thinker
from tests.landscape.clock import Clock
from tests.landscape.lab import TableLab
from tests.landscape.made_up import ABOUT
from tests.landscape.table import Landscape, Row
from tests.optimizer.scripted import SMALL, proposal

THOUGHT_S, SEARCH_S = 20.0, 200.0


class Slower(dict[str, Row]):
    """A record in which every program but the baseline is a fifth slower, and takes half a second to find out."""

    def __missing__(self, name: str) -> Row:
        return Row(name, name, first=(0.8, 0.81, 0.79), load_s=0.4, pair_s=0.05)


LAND = Landscape(ABOUT, "baseline", "baseline", Slower(baseline=Row("baseline", first=(1.0, 1.01, 0.99))))


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


@pytest.fixture
def searched(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    def search(clock: Clock, *agents: Any) -> Ledger:
        config = RunConfig(str(tiny_model), SMALL.to_json(), str(tmp_path), dtype="float32", threads=1, budget_s=1e4)
        store = FileStore(tmp_path)
        store.create(config.run_id, config.to_json())
        lease = store.claim(config.run_id, "worker", 60)
        assert lease
        with Ledger(config, store, lease, clock=clock) as ledger:
            lab = TableLab(LAND, read_config(tiny_model), ArtifactStore(tmp_path), clock)
            session = Session(config, agents, Budget(config.budget_s), ledger, lab)
            session.pause = clock.advance
            session.time_left = lambda: SEARCH_S - clock.now  # type: ignore[method-assign]
            session.search()
        return ledger

    yield search


def test_the_engine_works_while_an_agent_thinks(searched: Callable[..., Ledger]) -> None:
    clock = Clock(yield_s=0.001)
    agent = Ponders(clock.sleep, thinks=True)
    ledger = searched(clock, agent, Quick())
    assert ledger.utilisation >= 0.9
    assert agent.made >= 5, "and it comes to what it thinks of"
    measured = {c.name for c in ledger.candidates.values()}
    assert {"deep1", "deep2", "deep3"} <= measured
    assert agent.heard and {thread for _, thread in agent.heard} == {"agent ponders"}, "it hears in its own thread"
    assert "quick1" in {name for name, _ in agent.heard}


def test_an_agent_that_thinks_inline_is_seen_in_the_utilisation(searched: Callable[..., Ledger]) -> None:
    clock = Clock(yield_s=0.001)
    ledger = searched(clock, Ponders(clock.advance, thinks=False), Quick())
    assert ledger.utilisation < 0.5 and ledger.lost["agents proposing"] > 100


def test_alone_it_is_waited_for(searched: Callable[..., Ledger]) -> None:
    clock = Clock(yield_s=0.001)
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
