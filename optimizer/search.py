"""The search: ask -> predict -> measure -> verify -> tell, within a budget that covers the whole job.

Everything measured is stored before it is acted on; a run that was killed goes on from what is stored.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.artifacts import Artifact, ArtifactError, ArtifactStore
from engine.client import HostFailure
from engine.models.errors import ModelError
from optimizer.agents import limits, make_agents, seat
from optimizer.agents.base import Agent, Desk, SearchView, Tried
from optimizer.board import Board
from optimizer.builder import Builder, Built, describe
from optimizer.config import Budget, ConfigError, RunConfig
from optimizer.export.finish import FINISHER, finished
from optimizer.finals import MAX_FINALISTS, Finals
from optimizer.lab import Lab, Scene
from optimizer.ledger import Cancelled, Ledger, OnEvent
from optimizer.measure.servers import MeasureFailed
from optimizer.measure.tiers import Measured, TooFast, WrongValues
from optimizer.queue import ProposalQueue, Waiting
from optimizer.records import MEASURED, Candidate, Estimate, Experiment, Proposal, State
from optimizer.store import Lease, LeaseLost, RunStore
from optimizer.traffic.profile import TrafficError

TIER_ONE_LIMIT_S = 45.0
WORST_TRIAL_S = 4.0  # no candidate is begun with less time than this before the search ends
NEAR_BEST = 0.97  # of the incumbent's tier-1 ratio: what is slower than this does not go on to tier 2
PRUNE = 0.9  # a prediction whose upper end is below this is not measured
FASTER = (State.KEEP, State.MARGINAL)  # surely faster than the baseline; the end-to-end measurement judges by how much
PROMISING = (*FASTER, State.RETEST)
EXPECTED = (ModelError, TrafficError, ConfigError, ArtifactError, HostFailure, MeasureFailed)


class SearchFailed(Exception):
    """The run ended without a result; the text is a sentence with the mend."""


class Search:
    """One run. `run` returns the report, or None when a person stopped it."""

    def __init__(
        self, config: RunConfig, store: RunStore, on_event: OnEvent | None = None, agents: list[Agent] | None = None
    ) -> None:
        self.config, self.store, self.on_event = config, store, on_event
        self.agents = make_agents(config.seed, config.foci, config.llm) if agents is None else agents
        self.budget = Budget(config.budget_s)

    def run(self, lease: Lease) -> dict[str, Any] | None:
        """Raises LeaseLost when another worker took over, SearchFailed when no result can be had."""
        with Ledger(self.config, self.store, lease, self.on_event) as ledger:
            try:
                return self._job(ledger)
            except Cancelled:
                self._end(ledger, "cancelled", f"Stopped on request. {_kept(ledger)}")
                return None
            except EXPECTED as error:
                self._end(ledger, "failed", str(error))
                raise SearchFailed(str(error)) from error
            except LeaseLost:
                raise
            except Exception as error:
                self._end(ledger, "failed", f"The search stopped with an error: {type(error).__name__}: {error}")
                raise

    def _job(self, ledger: Ledger) -> dict[str, Any]:
        ledger.enter("profile", "Measuring the machine and the baseline on this traffic.")
        scene = Scene.of(self.config)
        lab = Lab(self.config, scene, ledger, ArtifactStore(Path(self.config.data_dir)))
        try:
            lab.open()
            session = Session(self, ledger, lab)
            session.resume()
            ledger.enter("search", f"{len(self.agents)} agents propose; candidates are measured against the baseline.")
            session.search()
            lab.measure_swaps(session.builder, session.worked())
            finalists = finished(session.finalists()[:MAX_FINALISTS], session.builder, ledger)
            lab.time_steps(*[t.candidate.artifact_hash for t in finalists])
        finally:
            lab.close()
        finals = Finals(self.config, session.budget, scene, lab, ledger)
        report = finals.conclude(finalists)
        ledger.store.put_report(ledger.lease, report)
        self._end(ledger, report["outcome"], report["reason"], report.get("speedup"))
        return report

    def _end(self, ledger: Ledger, outcome: str, reason: str, speedup: dict[str, Any] | None = None) -> None:
        speedup = speedup or {}
        figures = {name: speedup.get(name) for name in ("ratio", "ci_low", "ci_high")}
        ledger.store.set_progress(ledger.lease, ledger.phase, ledger.elapsed())
        ledger.event("finished", {"outcome": outcome, "reason": reason} | figures)
        ledger.store.finish(ledger.lease, outcome, reason)


class Session:
    """The loop and what it knows: board, queue, cost model, incumbent."""

    def __init__(self, search: Search, ledger: Ledger, lab: Lab) -> None:
        self.config, self.agents, self.budget = search.config, search.agents, search.budget
        self.ledger, self.lab = ledger, lab
        self.builder = Builder(Path(self.config.data_dir))
        self.board = Board(ledger.state.posts, ledger.post)
        self.queue = ProposalQueue(self.agents, self.board, ledger.proposal)
        self.tried: list[Tried] = []
        self.incumbent: Tried | None = None
        self.tier_one_best = 1.0
        self.cut_short: list[Experiment] = []  # an earlier attempt ended before it judged these
        seat(self.agents, Desk(self.board.post, ledger.log, ledger.llm_usage, dict(ledger.usage), self.over))

    def search(self) -> None:
        if not self.ledger.state.elapsed_s:  # a resumed run has had that time
            self.budget = replace(self.budget, search_began_s=self.ledger.elapsed())
        for sentence in limits(self.agents, self.view()):
            self.ledger.log(sentence)
        self.go_on()
        while self.time_left() > WORST_TRIAL_S and (waiting := self.ask()):
            self.ledger.check()
            estimate = self.predict(waiting.proposal)
            if estimate.high < PRUNE:
                self.prune(waiting, estimate)
            elif built := self.build(waiting):
                self.ledger.estimate(Estimate(**asdict(estimate) | {"artifact_hash": built.artifact.hash}))
                self.tell(built.candidate, self.measure(built, estimate))

    # ask

    def ask(self) -> Waiting | None:
        with self.ledger.losing("agents thinking"):
            self.queue.fill(self.view)
            measured = [self.ledger.proposals[t.candidate.proposal_id] for t in self.tried]
            return self.queue.take(self.predict, measured, set(self.sources()))

    def view(self) -> SearchView:
        scene, work = self.lab.scene, self.lab.work
        best: dict[str, Tried] = {}
        for t in sorted(self.tried, key=lambda t: (t.experiment.tier, t.experiment.ratio or 0.0)):
            best[t.candidate.focus] = t
        incumbent = self.incumbent.candidate if self.incumbent else None
        return SearchView(
            config=asdict(scene.config),
            dtype=self.config.dtype,
            tolerance=self.config.tolerance,
            machine=scene.machine,
            profile=self.lab.shares(),
            step_s=dict(work.step_s),
            prefill_share=work.prefill_share,
            concurrency=work.concurrency,
            posts=tuple(self.board.read(limit=40)),
            incumbent=incumbent,
            incumbent_files=self.ledger.proposals[incumbent.proposal_id].files if incumbent else {},
            best=best,
            experiments=tuple(self.tried),
            tried=frozenset(self.sources()),
            proposed=frozenset(p.name for p in self.ledger.proposals.values()),
            seed=self.config.seed,
        )

    # predict

    def predict(self, proposal: Proposal) -> Estimate:
        return self.lab.cost.predict("", proposal.focus, proposal.mechanism, bool(proposal.parent), proposal.expected)

    def prune(self, waiting: Waiting, estimate: Estimate) -> None:
        """Predicted only: counted apart from what was measured."""
        artifact = self.builder.store(waiting.proposal)
        candidate = describe(waiting.proposal, artifact, 0.0)
        self.ledger.candidate(candidate, ok=True)
        self.ledger.estimate(Estimate(**asdict(estimate) | {"artifact_hash": artifact.hash}))
        state, against = State.PREDICTED, self.lab.baseline.hash
        name = f"{artifact.hash[:16]}-0"
        self.ledger.experiment(
            candidate, Experiment(name, artifact.hash, 1, state, against, False, predicted=estimate.ratio)
        )
        self.board.release(waiting.claim)

    # measure

    def build(self, waiting: Waiting) -> Built | None:
        """None when it did not compile: the candidate is marked failed with the compiler's log."""
        with self.ledger.losing("compiling"):
            try:
                built = self.builder.build(waiting.proposal)
            except ArtifactError as error:
                self.ledger.log(f"{waiting.proposal.name} is not a candidate: {error}", "warning")
                self.board.release(waiting.claim)
                return None
        self.ledger.candidate(built.candidate, ok=not built.failure)
        if built.failure:
            experiment = self.failed(built, 1, built.failure, built.candidate.build_log)
            self.ledger.experiment(built.candidate, experiment)
            self.tell(built.candidate, experiment)
            return None
        return built

    def measure(self, built: Built, estimate: Estimate) -> Experiment:
        """Tier 1, and tier 2 for what may beat the incumbent. Returns the last of them; each is stored."""
        return self.promote(built, self.tier(built, 1, estimate), estimate)

    def promote(self, built: Built, first: Experiment, estimate: Estimate) -> Experiment:
        promising = first.state in PROMISING and (first.ratio or 0) >= NEAR_BEST * self.tier_one_best
        if not promising or self.time_left() < WORST_TRIAL_S:
            return first
        second = self.tier(built, 2, estimate)
        if second.state in MEASURED:
            self.tier_one_best = max(self.tier_one_best, first.ratio or 0.0)
        return second

    def tier(self, built: Built, tier: int, estimate: Estimate) -> Experiment:
        artifact, incumbent = built.artifact, self.incumbent_artifact()
        try:
            limit = min(TIER_ONE_LIMIT_S, max(self.time_left(), 2 * WORST_TRIAL_S))
            found = self.lab.tier_one(artifact, limit) if tier == 1 else self.lab.tier_two(artifact, incumbent)
        except HostFailure as failure:
            experiment = self.failed(built, tier, failure.message, failure.log_tail)
        except (WrongValues, TooFast) as wrong:
            experiment = self.failed(built, tier, str(wrong))
        else:
            experiment = self.measured(built, tier, found, estimate)
            if tier == 2:
                self.challenge(built, experiment, found)
        self.ledger.experiment(built.candidate, experiment)
        return experiment

    def measured(self, built: Built, tier: int, found: Measured, estimate: Estimate) -> Experiment:
        swap_s = None
        if tier == 1:
            swap_s = built.candidate.build_s + found.first_step_s
            self.ledger.swap(built.kind, swap_s)
        return Experiment(
            id=f"{built.artifact.hash[:16]}-{tier}",
            artifact_hash=built.artifact.hash,
            tier=tier,
            state=found.state,
            against=self.lab.baseline.hash,
            checks_passed=True,
            ratio=found.ratio.ratio,
            ci_low=found.ratio.ci_low,
            ci_high=found.ratio.ci_high,
            samples=list(found.ratio.ratios),
            predicted=estimate.ratio,
            metrics=found.metrics,
            device_s=found.device_s,
            hot_swap_s=swap_s,
        )

    def failed(self, built: Built, tier: int, why: str, log: str = "") -> Experiment:
        name, against = f"{built.artifact.hash[:16]}-{tier}", self.lab.baseline.hash
        return Experiment(name, built.artifact.hash, tier, State.FAILED, against, False, failure=why, log_tail=log)

    def challenge(self, built: Built, experiment: Experiment, found: Measured) -> None:
        """The challenger becomes the incumbent when it won the turns they took against each other."""
        over = found.over_incumbent
        wins = over.ratio > 1.0 if over and self.incumbent else found.state in FASTER
        if wins:
            self.incumbent = Tried(built.candidate, experiment)
            low, high = experiment.ci_low or 0.0, experiment.ci_high or 0.0
            self.ledger.incumbent(built.candidate, experiment.ratio or 1.0, low, high)
        self.lab.keep(*([self.incumbent.candidate.artifact_hash] if self.incumbent else []))

    # tell

    def tell(self, candidate: Candidate, experiment: Experiment) -> None:
        self.learn(candidate, experiment)
        self.board.result(candidate.agent, candidate, experiment)

    def learn(self, candidate: Candidate, experiment: Experiment) -> None:
        self.tried.append(Tried(candidate, experiment))
        proposal = self.ledger.proposals[candidate.proposal_id]
        self.lab.cost.learn(candidate.focus, candidate.mechanism, experiment, bool(proposal.parent), proposal.expected)
        for agent in self.agents:
            agent.told(candidate, experiment)

    # resume and finish

    def resume(self) -> None:
        """Everything an earlier attempt measured is told again; what it had only claimed is measured first."""
        last: dict[str, Experiment] = {}
        for experiment in self.ledger.experiments.values():
            if experiment.tier >= last.get(experiment.artifact_hash, experiment).tier:
                last[experiment.artifact_hash] = experiment
        for digest, experiment in last.items():
            candidate = self.ledger.candidates[digest]
            self.learn(candidate, experiment)
            if experiment.tier == 2 and experiment.state in FASTER and self.better(experiment):
                self.incumbent = Tried(candidate, experiment)
                self.ledger.best_ratio = experiment.ratio or 1.0
        told = {post.artifact_hash for post in self.board.read("result", "dead_end")}
        self.cut_short = [e for digest, e in last.items() if e.tier == 1 and e.state in MEASURED and digest not in told]
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
            self.tell(candidate, self.promote(built, experiment, estimate))

    def better(self, experiment: Experiment) -> bool:
        return self.incumbent is None or (experiment.ratio or 0.0) > (self.incumbent.experiment.ratio or 0.0)

    def finalists(self) -> list[Tried]:
        """What beat the baseline at tier 2, the incumbent first, then by ratio."""
        kept = [t for t in self.tried if t.experiment.tier == 2 and t.experiment.state in FASTER]
        first = self.incumbent.candidate.artifact_hash if self.incumbent else ""
        return sorted(kept, key=lambda t: (t.candidate.artifact_hash != first, -(t.experiment.ratio or 0.0)))

    def incumbent_artifact(self) -> Artifact | None:
        return self.lab.artifacts.get(self.incumbent.candidate.artifact_hash) if self.incumbent else None

    def sources(self) -> set[str]:
        return {t.candidate.source_hash for t in self.tried}

    def worked(self) -> dict[str, Proposal]:
        """By mechanism the last candidate that was measured: what a swap to its kind is timed with."""
        measured = [t.candidate for t in self.tried if t.experiment.state in MEASURED]
        return {c.mechanism: self.ledger.proposals[c.proposal_id] for c in measured}

    def over(self) -> bool:
        """Whether an agent that thinks is to stop."""
        return self.ledger.stopping or self.time_left() <= 0.0

    def time_left(self) -> float:
        return self.budget.search_end_s - self.ledger.elapsed()


def _kept(ledger: Ledger) -> str:
    count = ledger.counts()["tier1"]
    return f"{count} measured candidates are kept." if count else "Nothing had been measured yet."
