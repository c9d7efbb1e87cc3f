"""What the search benchmark runs on: a real lab on the demo, a session on it, and agents that always have something to say."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.artifacts import Artifact, ArtifactStore
from kernels import registry
from optimizer.agents import Agent, make_agents
from optimizer.agents.base import SearchView
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.config import Budget, RunConfig
from optimizer.file_store import FileStore, worker_name
from optimizer.lab import Lab, Scene
from optimizer.ledger import Ledger
from optimizer.records import Candidate, Experiment, Proposal
from optimizer.session import Session
from optimizer.traffic.sources import load_traffic
from tests import paths

KERNEL, PART = "decode_step", "whole_step"
FRESH_SHARE = 0.1  # of the points that need a compiler: it makes one while the engine measures about ten others
THOUGHT_S = 20.0


@dataclass
class Points:
    """Proposes points of the whole step's declared parameters: mostly other run-time values of what is compiled, and every so
    often a point beside the best that needs a compiler.
    """

    seed: int = 0
    name: str = "points"
    focus: str = "projections"
    best: tuple[float, Program] = (1.0, Program.of([PART]))
    made: set[str] = field(default_factory=set)

    def propose(self, view: SearchView) -> Proposal | None:
        rng = random.Random(f"{self.seed} {self.name} {len(self.made)}")
        for _ in range(200):
            program = self._near(self.best[1], rng)
            if program.name not in self.made | view.proposed and program.precision == "same":
                self.made.add(program.name)
                return as_proposal(program, self.name, parent=view.incumbent.artifact_hash if view.incumbent else "")
        return None

    def _near(self, program: Program, rng: random.Random) -> Program:
        op = registry.load(KERNEL)
        late = [p for p in op.params if p.late]
        changed = {p.name: rng.choice(p.values) for p in late if rng.random() < 0.6}
        if rng.random() < FRESH_SHARE:
            parameter = rng.choice([p for p in op.params if not p.late])
            changed[parameter.name] = rng.choice(parameter.values)
        here = {**program.parameters, **changed}
        return program.plus(**changed) if op.allows(here) else program

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        if candidate.name.startswith(PART) and experiment.leads:
            self.best = (experiment.ratio or 1.0, Program.parse(candidate.name))

    def limits(self, view: SearchView) -> list[str]:
        return []


@dataclass
class Slow(Points):
    """The same, after THOUGHT_S of thinking: what a language model takes."""

    name: str = "thinker"
    thinks: bool = True
    thoughts: int = 0

    def propose(self, view: SearchView) -> Proposal | None:
        time.sleep(THOUGHT_S)
        self.thoughts += 1
        return super().propose(view)


def as_proposal(program: Program, agent: str = "bench", mark: str = "", parent: str = "") -> Proposal:
    """`mark` is put in as a comment that makes it another text."""
    files = program.files()
    if mark:
        files = {n: f"{text}\n{'#' if n.endswith('.py') else '//'} {mark}\n" for n, text in files.items()}
    name = f"{program.name} {mark}".strip()
    return Proposal(
        f"{agent}-{name}", agent, "projections", name, "timing the search", program.mechanism, files, program.settings,
        program.precision, parent=parent,
    )  # fmt: skip


def config_of(data: Path, budget_s: float) -> RunConfig:
    """A run on the demo under `data`, which takes its model from the tests' folder."""
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "models").exists():
        paths.demo_model()
        (data / "models").symlink_to((paths.test_data() / "models").resolve())
    return RunConfig("demo", load_traffic("demo").to_json(), str(data), budget_s=budget_s)


@contextmanager
def demo_lab(data: Path, budget_s: float) -> Iterator[tuple[RunConfig, Ledger, Lab]]:
    """A new run on the demo model and traffic, its lab open."""
    config = config_of(data, budget_s)
    store = FileStore(data)
    store.create(config.run_id, config.to_json())
    lease = store.claim(config.run_id, worker_name(), 60)
    assert lease
    with Ledger(config, store, lease) as ledger:
        lab = Lab(config, Scene.of(config), ledger, ArtifactStore(data))
        try:
            lab.open()
            yield config, ledger, lab
        finally:
            lab.close()


def search(
    data: Path,
    seconds: float,
    agents: Sequence[Agent] | None = None,
    adapt: Callable[[Session], None] = lambda session: None,
) -> tuple[Ledger, Session, float]:
    """The loop alone for so long (no verification, no HTTP): what it measured, and the seconds it took. `adapt` changes the
    session before it begins.
    """
    with demo_lab(data, 10 * seconds) as (config, ledger, lab):
        agents = list(agents) if agents is not None else [*make_agents(config.seed), Points()]
        session = Session(config, agents, Budget(config.budget_s), ledger, lab)
        adapt(session)
        end = ledger.elapsed() + seconds
        session.time_left = lambda: end - ledger.elapsed()  # type: ignore[method-assign]
        session.trials.time_left = session.time_left
        start = time.monotonic()
        session.search()
        return ledger, session, time.monotonic() - start


def built(data: Path, program: Program, mark: str = "") -> Artifact:
    ended = Builder(data).build(as_proposal(program, mark=mark))
    assert not ended.failure, ended.failure
    return ended.artifact
