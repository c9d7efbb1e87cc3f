"""What a tier found, as the record that is stored."""

from __future__ import annotations

import hashlib

from engine.artifacts import Artifact
from engine.scheduler import SchedulerConfig
from optimizer.builder import Built
from optimizer.measure.stats import chained
from optimizer.measure.tiers import Measured, Repeats
from optimizer.records import Estimate, Experiment, State


def measured_first(
    built: Built, found: Measured, estimate: Estimate, visit: int, incumbent: Experiment | None
) -> Experiment:
    """Tier 1. Its speed over the baseline is the chain through `incumbent`, when it was timed against that."""
    paired = (found.ratio.ratio, found.ratio.ci_low, found.ratio.ci_high)
    ratio, low, high = chained(found.ratio, _interval(incumbent)) if incumbent else paired
    return Experiment(
        id=f"{built.artifact.hash[:16]}-1" + (f"v{visit}" if visit > 1 else ""),
        artifact_hash=built.artifact.hash,
        tier=1,
        state=found.state,
        against=found.against,
        checks_passed=True,
        ratio=ratio,
        ci_low=low,
        ci_high=high,
        samples=list(found.ratio.ratios),
        predicted=estimate.ratio,
        provenance=estimate.provenance,
        device_s=found.device_s,
        hot_swap_s=built.candidate.build_s + found.first_step_s,
        paired=paired[0],
        paired_low=paired[1],
        paired_high=paired[2],
        visit=visit,
        behaviour=scheduled(found.behaviour, built.artifact),
    )


def measured_second(built: Built, found: Measured, estimate: Estimate, behaviour: str, leads: bool) -> Experiment:
    """Tier 2, over the baseline, which takes part in every trial there."""
    ratio = found.ratio
    return Experiment(
        id=f"{built.artifact.hash[:16]}-2",
        artifact_hash=built.artifact.hash,
        tier=2,
        state=found.state,
        against=found.against,
        checks_passed=True,
        ratio=ratio.ratio,
        ci_low=ratio.ci_low,
        ci_high=ratio.ci_high,
        samples=list(ratio.ratios),
        predicted=estimate.ratio,
        provenance=estimate.provenance,
        metrics=found.metrics,
        device_s=found.device_s,
        paired=ratio.ratio,
        paired_low=ratio.ci_low,
        paired_high=ratio.ci_high,
        behaviour=behaviour,
        leads=leads,
    )


def duplicate(built: Built, earlier: Experiment, repeats: Repeats, estimate: Estimate) -> Experiment:
    """The earlier program's result, shared. The engine took no time for it."""
    return Experiment(
        id=f"{built.artifact.hash[:16]}-1",
        artifact_hash=built.artifact.hash,
        tier=1,
        state=State.DUPLICATE,
        against=earlier.against,
        checks_passed=True,
        ratio=earlier.ratio,
        ci_low=earlier.ci_low,
        ci_high=earlier.ci_high,
        predicted=estimate.ratio,
        provenance=estimate.provenance,
        paired=earlier.paired,
        paired_low=earlier.paired_low,
        paired_high=earlier.paired_high,
        behaviour=scheduled(repeats.behaviour, built.artifact),
        same_as=repeats.same_as,
    )


def failed(built: Built, tier: int, against: str, why: str, log: str = "") -> Experiment:
    name = f"{built.artifact.hash[:16]}-{tier}"
    return Experiment(name, built.artifact.hash, tier, State.FAILED, against, False, failure=why, log_tail=log)


def scheduled(behaviour: str, artifact: Artifact) -> str:
    """A step's behaviour with what the scheduler makes of the candidate's settings."""
    try:
        settings = repr(SchedulerConfig.from_settings(artifact.manifest.settings))
    except ValueError as wrong:
        settings = str(wrong)
    return f"{behaviour}.{hashlib.sha256(settings.encode()).hexdigest()[:8]}" if behaviour else ""


def _interval(link: Experiment) -> tuple[float, float, float]:
    assert link.ratio and link.ci_low and link.ci_high, "what was measured has a ratio"
    return link.ratio, link.ci_low, link.ci_high
