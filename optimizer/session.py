"""The loop: ask -> predict -> build -> measure -> tell, until the time is up or nobody has anything left to say.

It stands on a lab (what measures), a builder (what makes artefacts) and the ledger's clock, so that a search can also be run
on a recorded landscape: a lab that answers from a table, a clock that it moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from engine.artifacts import ArtifactError
from optimizer.agents import limits, seat
from optimizer.agents.base import Agent, Desk, Machine, SearchView, Tried
from optimizer.ahead import Workshop
from optimizer.board import Board
from optimizer.builder import Builder, Built, describe
from optimizer.config import Budget, RunConfig
from optimizer.experiments import failed
from optimizer.export.finish import FINISHER
from optimizer.ledger import Ledger
from optimizer.measuring import Measures
from optimizer.queue import ProposalQueue, Waiting
from optimizer.records import FASTER, MEASURED, Candidate, Estimate, Experiment, Proposal, State
from optimizer.standing import Standing
from optimizer.trials import WORST_TRIAL_S, Trials

PRUNE = 0.9  # a prediction whose upper end is below this is not measured
WAIT_S = 0.5  # between looks at the clock while there is nothing to measure


class Session:
    """The loop and what it knows: board, queue, cost model, and through `trials` the incumbent."""

    def __init__(
        self,
        config: RunConfig,
        agents: Sequence[Agent],
        budget: Budget,
        ledger: Ledger,
        lab: Measures,
        builder: Builder | None = None,
    ) -> None:
        self.config, self.agents, self.budget, self.ledger, self.lab = config, agents, budget, ledger, lab
        self.builder = builder or Builder(Path(config.data_dir))
        self.workshop = Workshop(self.builder.build, ledger.quiet)
        self.board = Board(ledger.state.posts, ledger.post)
        self.standing = Standing(config, lab, ledger)
        self.queue = ProposalQueue(agents, self.board, ledger.proposal, self.standing.bandit)
        self.trials = Trials(ledger, lab, self.time_left)
        self.trials.promise = self.promise
        self.pause: Callable[[float], None] = self.queue.wait  # with a virtual clock: what moves it on
        self.tried: list[Tried] = []
        self.best: dict[str, Tried] = {}  # by focus
        self.sources: set[str] = set()
        self.cut_short: list[Experiment] = []  # an earlier attempt ended before it judged these
        seat(agents, Desk(self.board.post, ledger.log, ledger.llm_usage, dict(ledger.usage), self.over))

    def search(self) -> None:
        if not self.ledger.state.elapsed_s:  # a resumed run has had that time
            self.budget = replace(self.budget, search_began_s=self.ledger.elapsed())
        for sentence in limits(self.agents, self.view()):
            self.ledger.log(sentence)
        self.standing.tell(self.trials.incumbent)
        with self.ledger.searching(), self.workshop:
            self.go_on()
            while self.time_left() > WORST_TRIAL_S and self.step():
                self.ledger.check()

    def step(self) -> bool:
        """One candidate, or a wait for one. False when nobody has anything left to say."""
        self.fill()
        if self.trials.due(idle=not self.queue.waiting):
            self.retest()
        elif waiting := self.take():
            estimate = self.predict(waiting.proposal)
            if estimate.high < PRUNE:
                with self.ledger.stage("predicted"):
                    self.prune(waiting, estimate)
            elif built := self.build(waiting):
                self.ledger.estimate(Estimate(**asdict(estimate) | {"artifact_hash": built.artifact.hash}))
                self.tell(built.candidate, self.trials.measure(built, estimate))
        elif self.queue.thinking:
            with self.ledger.losing("agents thinking"):
                self.pause(WAIT_S)
        else:
            return False
        return True

    # ask

    def fill(self) -> None:
        with self.ledger.losing("agents proposing"):
            self.queue.fill(self.view)
            self.workshop.want(self.queue.wanted(self.predict))

    def take(self) -> Waiting | None:
        measured = [self.ledger.proposals[t.candidate.proposal_id] for t in self.tried]
        return self.queue.take(self.predict, measured, self.sources, self.workshop.ready)

    def view(self) -> SearchView:
        scene, work = self.lab.scene, self.lab.work
        incumbent = self.trials.incumbent.candidate if self.trials.incumbent else None
        machine: Machine = scene.machine
        return SearchView(
            config=asdict(scene.config),
            dtype=self.config.dtype,
            tolerance=self.config.tolerance,
            machine=machine,
            profile=self.lab.shares(),
            step_s=dict(work.step_s),
            prefill_share=work.prefill_share,
            concurrency=work.concurrency,
            posts=tuple(self.board.read()),
            incumbent=incumbent,
            incumbent_files=self.ledger.proposals[incumbent.proposal_id].files if incumbent else {},
            best=dict(self.best),
            experiments=tuple(self.tried),
            tried=frozenset(self.sources),
            elites=self.standing.archive.elites(),
            proposed=frozenset(p.name for p in self.ledger.proposals.values()),
            seed=self.config.seed,
        )

    # predict

    def predict(self, proposal: Proposal) -> Estimate:
        return self.lab.cost.predict("", proposal.focus, proposal.mechanism, bool(proposal.parent), proposal.expected)

    def promise(self) -> float:
        """The speed over the baseline that is expected of the best program waiting."""
        return max((self.predict(w.proposal).ratio for w in self.queue.waiting), default=0.0)

    def prune(self, waiting: Waiting, estimate: Estimate) -> None:
        """Predicted only: counted apart from what was measured."""
        artifact = self.builder.store(waiting.proposal)
        candidate = describe(waiting.proposal, artifact, 0.0)
        self.ledger.candidate(candidate, ok=True)
        self.ledger.estimate(Estimate(**asdict(estimate) | {"artifact_hash": artifact.hash}))
        state, against = State.PREDICTED, self.lab.baseline.hash
        name = f"{artifact.hash[:16]}-0"
        self.ledger.experiment(
            candidate,
            Experiment(
                name, artifact.hash, 1, state, against, False, predicted=estimate.ratio, provenance=estimate.provenance
            ),
        )
        self.board.release(waiting.claim)

    # build

    def build(self, waiting: Waiting) -> Built | None:
        """None when it did not compile: the candidate is marked failed with the compiler's log."""
        with self.ledger.losing("compiling"):
            try:
                built = self.workshop.take(waiting.proposal)
            except ArtifactError as error:
                self.ledger.log(f"{waiting.proposal.name} is not a candidate: {error}", "warning")
                self.board.release(waiting.claim)
                return None
        self.ledger.candidate(built.candidate, ok=not built.failure)
        if built.failure:
            experiment = failed(built, 1, self.lab.baseline.hash, built.failure, built.candidate.build_log)
            self.ledger.experiment(built.candidate, experiment)
            self.tell(built.candidate, experiment)
            return None
        return built

    # tell

    def retest(self) -> None:
        """A candidate that could not be told from the incumbent is measured again, on content it has not seen."""
        built, estimate, earlier = self.trials.next_due()
        self.tell(built.candidate, self.trials.measure(built, estimate, earlier))

    def tell(self, candidate: Candidate, experiment: Experiment) -> None:
        self.learn(candidate, experiment)
        self.standing.tell(self.trials.incumbent)
        if experiment.state is State.DUPLICATE:
            whole = self.trials.known.get(experiment.behaviour)
            earlier = self.ledger.candidates[whole or experiment.same_as]
            self.board.repeat(candidate.agent, candidate, experiment, earlier, bool(whole))
        else:
            self.board.result(candidate.agent, candidate, experiment)
        self.queue.talk(self.view)

    def learn(self, candidate: Candidate, experiment: Experiment) -> None:
        tried = Tried(candidate, experiment)
        self.tried.append(tried)
        self.sources.add(candidate.source_hash)
        best = self.best.get(candidate.focus)
        if best is None or _rank(tried) >= _rank(best):
            self.best[candidate.focus] = tried
        proposal = self.ledger.proposals[candidate.proposal_id]
        if experiment.visit == 1:
            combines = bool(proposal.parent)
            self.lab.cost.learn(candidate.focus, candidate.mechanism, experiment, combines, proposal.expected)
        self.standing.learn(candidate, experiment)
        self.queue.told(candidate, experiment)

    # resume and finish

    def resume(self) -> None:
        """Everything an earlier attempt measured is told again; what it had only claimed is measured first."""
        last: dict[str, Experiment] = {}
        for experiment in self.ledger.experiments.values():
            held = last.get(experiment.artifact_hash, experiment)
            if (experiment.tier, experiment.visit) >= (held.tier, held.visit):
                last[experiment.artifact_hash] = experiment
        told = {post.artifact_hash for post in self.board.read("result", "dead_end")}
        judged = (*MEASURED, State.DUPLICATE)
        self.cut_short = [e for digest, e in last.items() if e.tier == 1 and e.state in judged and digest not in told]
        unjudged = {e.artifact_hash for e in self.cut_short}
        for digest in [d for d in last if d not in unjudged]:
            self.learn(self.ledger.candidates[digest], last[digest])
        self.trials.restore(unjudged, self.predict)
        done = {self.ledger.candidates[digest].proposal_id for digest in last}
        open_ones = (p for p in self.ledger.proposals.values() if p.id not in done and p.agent != FINISHER)
        self.queue.restore(open_ones)
        if done:
            self.ledger.log(f"Resumed: {len(done)} candidates of earlier attempts are kept.")

    def go_on(self) -> None:
        """Candidates that an earlier attempt measured at tier 1 and did not come to judge."""
        for experiment in self.cut_short:
            candidate = self.ledger.candidates[experiment.artifact_hash]
            built = Built(candidate, self.lab.artifacts.get(candidate.artifact_hash))
            estimate = self.predict(self.ledger.proposals[candidate.proposal_id])
            self.tell(candidate, self.trials.promote(built, experiment, estimate))

    def finalists(self) -> list[Tried]:
        """What beat the baseline at tier 2, the incumbent first, then by ratio."""
        kept = [t for t in self.tried if t.experiment.tier == 2 and t.experiment.state in FASTER]
        first = self.trials.incumbent.candidate.artifact_hash if self.trials.incumbent else ""
        return sorted(kept, key=lambda t: (t.candidate.artifact_hash != first, -(t.experiment.ratio or 0.0)))

    def worked(self) -> dict[str, Proposal]:
        """By mechanism the last candidate that was measured: what a swap to its kind is timed with."""
        measured = [t.candidate for t in self.tried if t.experiment.state in MEASURED]
        return {c.mechanism: self.ledger.proposals[c.proposal_id] for c in measured}

    def over(self) -> bool:
        """Whether an agent that thinks is to stop."""
        return self.ledger.stopping or self.time_left() <= 0.0

    def time_left(self) -> float:
        return self.budget.search_end_s - self.ledger.elapsed()


def _rank(tried: Tried) -> tuple[int, float]:
    return tried.experiment.tier, tried.experiment.ratio or 0.0
