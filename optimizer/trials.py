"""What is measured how: tier 1 against the incumbent, tier 2 for what may beat it, once more for what cannot be told.

Knows the incumbent, and every behaviour that was measured. Each experiment is stored before anything follows from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.artifacts import Artifact
from engine.client import HostFailure
from optimizer.agents.base import Tried
from optimizer.builder import Built
from optimizer.experiments import duplicate, failed, measured_first, measured_second
from optimizer.ledger import Ledger
from optimizer.measure.tiers import Repeats, TooFast, WrongValues
from optimizer.measuring import Measures
from optimizer.records import FASTER, MEASURED, Candidate, Estimate, Experiment, Proposal, State

TIER_ONE_LIMIT_S = 45.0
WORST_TRIAL_S = 4.0  # no candidate is begun with less time than this before the search ends
NEAR_BEST = (
    0.97  # of the incumbent's tier-1 ratio: a program not slower than this is worth trying with other scheduling
)
MOST_VISITS = 3
MEANWHILE = 4  # candidates that are measured before one comes back
TRAFFIC_SHARE = (
    0.2  # of the engine's time, from which programs that differ in scheduling alone wait for their turn at tier 2
)


OUTSHONE = 0.7  # of what is expected of the best waiting program: what is slower is confirmed later
LATE_S = 20.0  # time left, from which nothing is put off


class Again(NamedTuple):
    built: Built
    estimate: Estimate
    earlier: Experiment


class Trials:
    def __init__(self, ledger: Ledger, lab: Measures, time_left: Callable[[], float]) -> None:
        self.ledger, self.lab, self.time_left = ledger, lab, time_left
        self.incumbent: Tried | None = None  # with its experiment of tier 2
        self.first: dict[str, Experiment] = {}  # artefact hash -> its latest experiment of tier 1
        self.known: dict[str, str] = {}  # behaviour with its scheduling -> the artefact that was measured
        self.steps: dict[str, str] = {}  # behaviour of a step alone -> the artefact that was measured
        self.again: deque[tuple[int, Again]] = deque()  # (number of measurements from which it is due, what)
        self.rescheduled: deque[Again] = deque()  # known programs under another scheduling
        self.postponed: deque[Again] = (
            deque()
        )  # faster than the incumbent, and far slower than what is expected of others
        self.promise: Callable[[], float] = lambda: (
            0.0
        )  # speed over the baseline expected of the best program that waits
        self.count = 0
        self.tier_two_s = 0.0

    def measure(self, built: Built, estimate: Estimate, earlier: Experiment | None = None) -> Experiment:
        """Tier 1, and tier 2 for what may beat the incumbent. Returns the last of them; each is stored."""
        if earlier and earlier.state in (State.DUPLICATE, *FASTER):
            return self.tier_two(built, estimate)
        return self.promote(built, self.tier_one(built, estimate, earlier), estimate)

    def promote(self, built: Built, first: Experiment, estimate: Estimate) -> Experiment:
        if first.state is State.RETEST and first.visit < MOST_VISITS:
            self.again.append((self.count + MEANWHILE, Again(built, estimate, first)))
        if first.state is State.DUPLICATE and self.reschedules(first):
            self.rescheduled.append(Again(built, estimate, first))
        if first.state not in FASTER or self.time_left() < WORST_TRIAL_S:
            return first
        if self.outshone(first):
            self.postponed.append(Again(built, estimate, first))
            return first
        return self.tier_two(built, estimate)

    def outshone(self, first: Experiment) -> bool:
        """Whether the engine has better to do than to confirm it: something far faster is waiting to be measured."""
        return self.time_left() > LATE_S and (first.ratio or 0.0) < OUTSHONE * self.promise()

    def reschedules(self, first: Experiment) -> bool:
        """A program no slower than the incumbent under a scheduling not measured with it: tier 1 does not see that."""
        best = self.first.get(self.incumbent.candidate.artifact_hash) if self.incumbent else None
        return first.behaviour not in self.known and (first.ratio or 0.0) >= NEAR_BEST * ((best and best.ratio) or 1.0)

    # candidates that come back

    def due(self, idle: bool) -> bool:
        now = bool(self.again) and (idle or self.again[0][0] <= self.count)
        return self._postponed_due(idle) or now or self._traffic_due(idle)

    def next_due(self) -> Again:
        """Call when `due`. Tier 2 of a program that was faster than the incumbent goes first, the fastest of them."""
        if self._postponed_due(idle=False) or (self.postponed and not self.again and not self.rescheduled):
            best = max(self.postponed, key=lambda again: again.earlier.ratio or 0.0)
            self.postponed.remove(best)
            return best
        if self.again and (self.again[0][0] <= self.count or not self.rescheduled):
            return self.again.popleft()[1]
        return self.rescheduled.popleft() if self.rescheduled else self.again.popleft()[1]

    def _postponed_due(self, idle: bool) -> bool:
        """Forgets what a new incumbent has left behind."""
        led = self.first.get(self.incumbent.candidate.artifact_hash) if self.incumbent else None
        for again in [a for a in self.postponed if led and (a.earlier.ratio or 0.0) <= (led.ratio or 0.0)]:
            self.postponed.remove(again)
        return any(idle or not self.outshone(again.earlier) for again in self.postponed)

    def _traffic_due(self, idle: bool) -> bool:
        while self.rescheduled and not self.reschedules(self.rescheduled[0].earlier):
            self.rescheduled.popleft()  # a faster incumbent came, or the same was measured under another name
        spent = self.tier_two_s / self.ledger.busy_s if self.ledger.busy_s else 0.0
        return bool(self.rescheduled) and (idle or spent < TRAFFIC_SHARE)

    # tiers

    def tier_one(self, built: Built, estimate: Estimate, earlier: Experiment | None = None) -> Experiment:
        artifact, incumbent = built.artifact, self.incumbent_artifact()
        rival = incumbent.hash if incumbent else self.lab.baseline.hash
        pairs = earlier.samples if earlier and earlier.against == rival else ()
        visit = earlier.visit + 1 if earlier else 1
        limit = min(TIER_ONE_LIMIT_S, max(self.time_left(), 2 * WORST_TRIAL_S))
        self.count += 1

        def judge(behaviour: str) -> None:
            same = self.steps.get(behaviour, artifact.hash)
            if same != artifact.hash:
                raise Repeats(behaviour, same)

        try:
            with self.ledger.working("tier1"):
                found = self.lab.tier_one(artifact, incumbent, limit, pairs, judge)
        except Repeats as repeats:
            experiment = duplicate(built, self.first[repeats.same_as], repeats, estimate)
        except (HostFailure, WrongValues, TooFast) as failure:
            experiment = failed(built, 1, self.lab.baseline.hash, *_why(failure))
        else:
            experiment = measured_first(built, found, estimate, visit, self.first.get(found.against))
            self.ledger.disturbed += found.disturbed
            if visit == 1:
                self.ledger.swap(built.kind, experiment.hot_swap_s or 0.0)
        self.ledger.experiment(built.candidate, experiment)
        self.note(experiment)
        return experiment

    def tier_two(self, built: Built, estimate: Estimate) -> Experiment:
        begun = self.ledger.busy_s
        try:
            with self.ledger.working("tier2"):
                found = self.lab.tier_two(built.artifact, self.incumbent_artifact())
        except (HostFailure, WrongValues, TooFast) as failure:
            experiment = failed(built, 2, self.lab.baseline.hash, *_why(failure))
        else:
            # it leads when it surely won the turns that it and the incumbent took against each other
            leads = (found.beats if self.incumbent else found.state) in FASTER
            first = self.first.get(built.artifact.hash)
            experiment = measured_second(built, found, estimate, first.behaviour if first else "", leads)
        self.tier_two_s += self.ledger.busy_s - begun
        self.ledger.experiment(built.candidate, experiment)
        self.note(experiment)
        if experiment.leads:
            self.crown(built.candidate, experiment)
        if experiment.state in MEASURED:
            self.lab.keep(*([self.incumbent.candidate.artifact_hash] if self.incumbent else []))
        return experiment

    def note(self, experiment: Experiment) -> None:
        """Later programs that behave like this one are duplicates of it."""
        digest, behaviour = experiment.artifact_hash, experiment.behaviour
        if experiment.tier == 1 and experiment.state in (*MEASURED, State.DUPLICATE):
            self.first[digest] = experiment
        if behaviour and experiment.state in MEASURED:
            self.known.setdefault(behaviour, digest)
            if experiment.tier == 1:
                self.steps.setdefault(behaviour.partition(".")[0], digest)

    # the incumbent

    def crown(self, candidate: Candidate, experiment: Experiment) -> None:
        self.incumbent = Tried(candidate, experiment)
        low, high = experiment.ci_low or 0.0, experiment.ci_high or 0.0
        self.ledger.incumbent(candidate, experiment.ratio or 1.0, low, high)

    def incumbent_artifact(self) -> Artifact | None:
        return self.lab.artifacts.get(self.incumbent.candidate.artifact_hash) if self.incumbent else None

    def restore(self, unjudged: set[str], predict: Callable[[Proposal], Estimate]) -> None:
        """What an earlier attempt knew: the incumbent, behaviours, and who was to come back. `unjudged` are judged first."""
        for experiment in self.ledger.experiments.values():
            self.note(experiment)
            if experiment.leads:
                self.incumbent = Tried(self.ledger.candidates[experiment.artifact_hash], experiment)
                self.ledger.best_ratio = experiment.ratio or 1.0
        later = {e.artifact_hash for e in self.ledger.experiments.values() if e.tier == 2}
        for digest, experiment in self.first.items():
            if digest in unjudged | later:
                continue
            if experiment.state is State.RETEST and experiment.visit < MOST_VISITS:
                self.again.append((0, self._waiting(experiment, predict)))
            elif experiment.state is State.DUPLICATE and self.reschedules(experiment):
                self.rescheduled.append(self._waiting(experiment, predict))
            elif experiment.state in FASTER:
                self.postponed.append(self._waiting(experiment, predict))

    def _waiting(self, experiment: Experiment, predict: Callable[[Proposal], Estimate]) -> Again:
        candidate = self.ledger.candidates[experiment.artifact_hash]
        built = Built(candidate, self.lab.artifacts.get(experiment.artifact_hash))
        return Again(built, predict(self.ledger.proposals[candidate.proposal_id]), experiment)


def _why(failure: Exception) -> tuple[str, str]:
    return (failure.message, failure.log_tail) if isinstance(failure, HostFailure) else (str(failure), "")
