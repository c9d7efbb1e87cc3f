"""Statistics of paired speed ratios: interval, noise floor, and when to stop measuring. A ratio above 1 is faster.

All work is on logarithms, where a ratio and its inverse weigh alike. Intervals are Student's t on the pairs' logs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from optimizer.records import State

LOOKS = (4, 6, 9, 13, 19, 28)  # pairs after which a sequential measurement may stop
MIN_MARGIN = 0.005  # a gain under half a per cent is never called one
PRIOR_PAIRS = 6  # what is known of the scatter here weighs as much as so many further pairs
POOL_PAIRS = 200  # and is taken over about so many of the latest


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The geometric mean of paired ratios. `ci_*` is the interval of that mean; `p10`, `p90` describe single pairs."""

    ratio: float
    ci_low: float
    ci_high: float
    pairs: int
    p10: float
    p90: float
    confidence: float
    ratios: tuple[float, ...]  # in the order measured


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What identical programs show here. `margin`: the relative gain that such a pair's mean could still pretend."""

    margin: float
    spread: float  # standard deviation of a single pair's log-ratio
    pairs: int


@dataclass(slots=True)
class Spread:
    """How far single pairs scatter on this machine just now, over all candidates: few pairs of one candidate say little of it.

    Used as the prior of a moderated t interval: a candidate's own variance is averaged with this one by degrees of freedom.
    """

    variance: float = 0.0
    pairs: float = 0.0

    def learn(self, ratios: Sequence[float]) -> None:
        """Adds a candidate's pairs. What is older than POOL_PAIRS fades."""
        free = len(ratios) - 1
        if free < 1:
            return
        kept = min(self.pairs, POOL_PAIRS)
        self.variance = (self.variance * kept + float(_logs(ratios).var(ddof=1)) * free) / (kept + free)
        self.pairs = kept + free

    @property
    def weight(self) -> float:
        """Degrees of freedom it counts for."""
        return min(self.pairs, PRIOR_PAIRS)


@dataclass(frozen=True, slots=True)
class Decision:
    """`done`: stop measuring; `state` is None until then. `estimate` holds at all looks together."""

    done: bool
    state: State | None
    estimate: PairedRatio | None


def paired_ratio(ratios: Sequence[float], confidence: float = 0.95, prior: Spread | None = None) -> PairedRatio:
    """Raises ValueError for fewer than two pairs, or for a ratio that is not a positive number."""
    logs = _logs(ratios)
    if len(logs) < 2:
        raise ValueError("an interval needs at least two pairs")
    known = prior or Spread()
    free = len(logs) - 1 + known.weight
    variance = (float(logs.var(ddof=1)) * (len(logs) - 1) + known.variance * known.weight) / free
    half = stats.t.ppf(0.5 + confidence / 2, free) * math.sqrt(variance / len(logs))
    mean = float(logs.mean())
    p10, p90 = (float(math.exp(q)) for q in np.quantile(logs, (0.1, 0.9)))
    return PairedRatio(
        math.exp(mean),
        math.exp(mean - half),
        math.exp(mean + half),
        len(logs),
        p10,
        p90,
        confidence,
        tuple(map(float, ratios)),
    )


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean, low, high of positive values, on the log scale; with one value the bounds are the value itself."""
    if len(values) < 2:
        return (float(values[0]),) * 3
    estimate = paired_ratio(values, confidence)
    return estimate.ratio, estimate.ci_low, estimate.ci_high


def chained(ratio: PairedRatio, link: tuple[float, float, float]) -> tuple[float, float, float]:
    """Speed over the baseline through the incumbent: ratio, low and high of `ratio` times the incumbent's own (`link`).

    The two were measured apart, so the halves of their intervals add up in squares on the log scale.
    """
    mine, its = (math.log(high / low) / 2 for low, high in ((ratio.ci_low, ratio.ci_high), link[1:]))
    half = math.hypot(mine, its)
    value = ratio.ratio * link[0]
    return value, value * math.exp(-half), value * math.exp(half)


def interleaving(pairs: int) -> list[tuple[str, str]]:
    """The order within each pair: A B, B A, A B ... so that a steady drift cancels between neighbours."""
    return [("a", "b") if i % 2 == 0 else ("b", "a") for i in range(pairs)]


def noise_floor(null_ratios: Sequence[float]) -> NoiseFloor:
    """From pairs of a program with itself: the outer 95% bound of their mean, at least MIN_MARGIN."""
    estimate = paired_ratio(null_ratios)
    outer = max(math.log(estimate.ci_high), -math.log(estimate.ci_low))
    return NoiseFloor(max(MIN_MARGIN, math.expm1(outer)), float(_logs(null_ratios).std(ddof=1)), estimate.pairs)


def decide(
    ratios: Sequence[float],
    margin: float = MIN_MARGIN,
    looks: Sequence[int] = LOOKS,
    error: float = 0.05,
    prior: Spread | None = None,
) -> Decision:
    """Whether the pairs so far settle that the candidate is faster by more than `margin`.

    The allowed error is split evenly over the looks, so the chance of keeping a candidate that is no faster than
    `margin` stays under `error / 2` however often one looks. Settled: KEEP (interval above) or DISCARD (below).
    At the last look: MARGINAL (faster than 1 for sure, by more than `margin` not), otherwise RETEST.
    """
    n = len(ratios)
    if n not in looks:
        if n < looks[-1]:
            return Decision(False, None, None)
        return decide(ratios[: looks[-1]], margin, looks, error, prior)
    estimate = paired_ratio(ratios, 1 - error / len(looks), prior)
    if estimate.ci_low > 1 + margin:
        return Decision(True, State.KEEP, estimate)
    if estimate.ci_high < 1 + margin:
        return Decision(True, State.DISCARD, estimate)
    if n < looks[-1]:
        return Decision(False, None, estimate)
    return Decision(True, State.MARGINAL if estimate.ci_low > 1 else State.RETEST, estimate)


def conclude(
    ratios: Sequence[float], margin: float = MIN_MARGIN, error: float = 0.05, prior: Spread | None = None
) -> Decision:
    """The verdict on a measurement that ended for another reason (time is up): its pairs as one last look."""
    return decide(ratios, margin, (len(ratios),), error / len(LOOKS), prior)


def percentile(values: Sequence[float], level: float) -> float:
    """`level` from 0 to 100, linear between ranks; NaN for no values."""
    return float(np.percentile(values, level)) if len(values) else math.nan


def _logs(ratios: Sequence[float]) -> np.ndarray:
    array = np.asarray(ratios, dtype=float)
    if not np.all(np.isfinite(array)) or np.any(array <= 0):
        raise ValueError("a ratio must be a positive number")
    return np.log(array)
