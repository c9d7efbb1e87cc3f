"""A search on the record: session, agents, queue, board and trials are the real ones; lab, compiler and clock are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.artifacts import ArtifactStore
from engine.models.config import ModelConfig
from optimizer.agents.base import Agent
from optimizer.board import Board
from optimizer.builder import Built
from optimizer.config import Budget, RunConfig
from optimizer.cost.pruning import Moment
from optimizer.ledger import Ledger
from optimizer.queue import Waiting
from optimizer.records import Estimate, Experiment, Post, Provenance
from optimizer.session import Session
from optimizer.store import Lease, RunState
from tests.landscape import rivals
from tests.landscape.clock import Clock
from tests.landscape.lab import TableBuilder, TableLab, TableWorkshop
from tests.landscape.table import Landscape


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    agents: Callable[[int], Sequence[Agent]]
    adapt: Callable[[Session], None] = lambda session: None


@dataclass
class Replayed:
    """`moments`: when (seconds) which program was confirmed as the best, with its recorded speed over the baseline."""

    contender: str
    seed: int
    budget_s: float
    moments: list[tuple[float, str, float]] = field(default_factory=list)
    pruning: list[Moment] = field(default_factory=list)  # by predictions
    cautious: list[Moment] = field(default_factory=list)  # by their upper ends, as the session prunes
    counts: dict[str, Any] = field(default_factory=dict)
    ended_s: float = 0.0

    def best(self, share: float = 1.0) -> float:
        """The confirmed program's speed after so much of the budget, 1 while none was."""
        return max((speed for at, _, speed in self.moments if at <= share * self.budget_s), default=1.0)

    def reached(self, speed: float) -> float:
        """Seconds until something at least so fast was confirmed, infinity when nothing was."""
        return next((at for at, _, found in self.moments if found >= speed), float("inf"))


def replay(
    land: Landscape, config: ModelConfig, contender: Contender, seed: int, budget_s: float, folder: Path
) -> Replayed:
    """`folder` takes the artefacts; replays may share one."""
    clock, found = Clock(), Replayed(contender.name, seed, budget_s)

    def on_event(kind: str, payload: dict[str, Any]) -> None:
        if kind == "incumbent":
            name = payload["name"]
            found.moments.append((clock(), name, land.speed(name, 2)))

    run = RunConfig("recorded", {"name": "recorded"}, str(folder), budget_s=10 * budget_s, seed=seed)
    ledger = Ledger(run, Nowhere(), Lease(run.run_id, "replay", 1, 0.0), on_event, clock)
    lab = TableLab(land, config, ArtifactStore(folder), clock, seed)
    session = on_clock(Session(run, contender.agents(seed), Budget(run.budget_s), ledger, lab, TableBuilder(folder)))
    contender.adapt(session)
    session.time_left = session.trials.time_left = lambda: budget_s - clock()  # type: ignore[method-assign]
    watch(session, land, found)
    session.search()
    found.counts, found.ended_s = ledger.counts(), clock()
    return found


def on_clock(session: Session) -> Session:
    """The session with a compiler and a wait that move its lab's clock."""
    lab = session.lab
    assert isinstance(lab, TableLab)
    session.workshop = TableWorkshop(session.builder.build, lab.land, lab.clock)  # type: ignore[assignment]
    session.pause = lab.clock.advance
    return session


def watch(session: Session, land: Landscape, found: Replayed) -> None:
    """Notes of each program, when it is taken, whether it is in the better half of all that were proposed so far, as the
    cost model then predicts them.
    """
    take = session.take

    def watched() -> Waiting | None:
        waiting = take()
        if waiting is not None:
            foreseen = [session.predict(p).ratio for p in session.ledger.proposals.values()]
            own, speed = session.predict(waiting.proposal), land.speed(waiting.proposal.name, 2)
            for moments, end in ((found.pruning, own.ratio), (found.cautious, own.high)):
                moments.append(Moment(sum(f > end for f in foreseen), len(foreseen), speed))
        return waiting

    session.take = watched  # type: ignore[method-assign]


# what is taken away


def no_cost_model(session: Session) -> None:
    """Every program is foreseen alike: none is pruned, and the queue goes by its other rules."""
    session.predict = lambda proposal: Estimate("", 1.0, 1.0, 1.0, Provenance.UNVALIDATED)  # type: ignore[method-assign]


def no_tier_one(session: Session) -> None:
    """Every program goes to all layers and the traffic."""

    def measure(built: Built, estimate: Estimate, earlier: Experiment | None = None) -> Experiment:
        return session.trials.tier_two(built, estimate)

    session.trials.measure = measure  # type: ignore[method-assign]


def no_board(session: Session) -> None:
    """Nothing is claimed; the agents are `rivals.Alone`."""
    session.board = session.queue.board = Unshared(on_post=session.ledger.post)


class Unshared(Board):
    def claim(self, agent: str, source_hash: str, content_hash: str, text: str, *more: Any, **how: Any) -> Post | None:
        return self.post(agent, "claim", text, data={"source_hash": source_hash, "content_hash": content_hash})


OURS = Contender("ours", rivals.ours)
RANDOM = Contender("random search", lambda seed: [rivals.RandomSearch(seed)], no_cost_model)
TPE = Contender("Optuna's TPE", lambda seed: [rivals.Tpe(seed)], no_cost_model)
ABLATIONS = (
    Contender("ours, no board", lambda seed: rivals.apart(rivals.ours(seed)), no_board),
    Contender("ours, no cost model", rivals.ours, no_cost_model),
    Contender("ours, no tier 1", rivals.ours, no_tier_one),
)


class Nowhere:
    """A store that keeps nothing: a replay is never resumed."""

    def load(self, run_id: str) -> RunState:
        return RunState(run_id, {})

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        return lease

    def cancelled(self, run_id: str) -> bool:
        return False

    def append_event(self, lease: Lease, kind: str, payload: dict[str, Any]) -> int:
        return 0

    def _ignore(self, *given: Any) -> None: ...

    put_proposal = put_candidate = put_estimate = put_experiment = put_checks = put_post = set_progress = _ignore
