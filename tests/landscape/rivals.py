"""Who searches: our agents kept to the space, random search and Optuna's TPE. All propose to the same session."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import optuna

from optimizer.agents import KINDS
from optimizer.agents.base import Agent, SearchView
from optimizer.agents.focused import FocusAgent
from optimizer.agents.heard import Start
from optimizer.agents.programs.program import Program
from optimizer.records import MEASURED, Candidate, Experiment, Proposal, State
from tests.bench.searching import as_proposal
from tests.landscape import space

TRIES = 200  # draws in a row that may be no new program before a sampler has nothing to say


def ours(seed: int) -> list[Agent]:
    """The built-in agents; what lies outside the space they do not propose."""
    return [type(kind.__name__, (_Within, kind), {})(seed) for kind in KINDS]


class _Within:
    def _neighbours(self, program: Program) -> list[Program]:
        near = map(space.canonical, FocusAgent._neighbours(self, program))  # type: ignore[arg-type]
        return [n for n in near if n.name in space.names()]

    def _new(self, start: Start, view: SearchView, *, same_source: bool) -> Proposal | None:
        start = start._replace(program=space.canonical(start.program))
        inside = start.program.name in space.names()
        return FocusAgent._new(self, start, view, same_source=same_source) if inside else None  # type: ignore[arg-type]


@dataclass
class RandomSearch:
    """Every program of the space is as likely as another, and none comes twice."""

    seed: int = 0
    name: str = "random"
    focus: str = "projections"
    thinks: bool = False

    def __post_init__(self) -> None:
        self.left = list(space.programs())
        random.Random(f"random {self.seed}").shuffle(self.left)

    def propose(self, view: SearchView) -> Proposal | None:
        return as_proposal(self.left.pop(), self.name) if self.left else None

    def told(self, candidate: Candidate, experiment: Experiment) -> None: ...

    def limits(self, view: SearchView) -> list[str]:
        return []


@dataclass
class Tpe:
    """Optuna's tree-structured Parzen estimator over the space's choices, told log speeds over the baseline.

    A draw that was measured before is told what that showed, one that is no program failed; neither costs time.
    """

    seed: int = 0
    name: str = "tpe"
    focus: str = "projections"
    asked: dict[str, Any] = field(default_factory=dict)  # program -> its open trial
    known: dict[str, float | None] = field(default_factory=dict)  # program -> log speed, None for a failure

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed, constant_liar=True)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)

    def propose(self, view: SearchView) -> Proposal | None:
        for _ in range(TRIES):
            trial = self.study.ask()
            program = space.choose(trial.suggest_categorical)
            if program is None or program.name in self.asked:
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            elif program.name in self.known:
                self._tell(trial, self.known[program.name])
            else:
                self.asked[program.name] = trial
                return as_proposal(program, self.name)
        return None

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        trial = self.asked.pop(candidate.name, None)
        if trial is not None:
            usable = experiment.ratio and experiment.state in (*MEASURED, State.DUPLICATE)
            self.known[candidate.name] = math.log(experiment.ratio) if usable and experiment.ratio else None
            self._tell(trial, self.known[candidate.name])

    def limits(self, view: SearchView) -> list[str]:
        return []

    def _tell(self, trial: Any, value: float | None) -> None:
        failed = optuna.trial.TrialState.FAIL
        self.study.tell(trial, value, state=failed if value is None else None)


@dataclass
class Alone:
    """An agent without the board: it hears of nothing but its own, and sees no more than that."""

    agent: Agent
    own: dict[str, str] = field(default_factory=dict)  # name -> source hash

    def __post_init__(self) -> None:
        self.name, self.focus = self.agent.name, self.agent.focus

    def propose(self, view: SearchView) -> Proposal | None:
        mine = {n: t for n, t in view.best.items() if t.candidate.agent == self.name}
        blind = replace(
            view,
            posts=(),
            incumbent=None,
            incumbent_files={},
            best=mine,
            experiments=tuple(t for t in view.experiments if t.candidate.agent == self.name),
            tried=frozenset(self.own.values()),
            proposed=frozenset(self.own),
        )
        return self.agent.propose(blind)

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        if candidate.agent == self.name:
            self.own[candidate.name] = candidate.source_hash
            self.agent.told(candidate, experiment)

    def limits(self, view: SearchView) -> list[str]:
        return self.agent.limits(view)


def apart(agents: Collection[Agent]) -> list[Agent]:
    return [Alone(agent) for agent in agents]
