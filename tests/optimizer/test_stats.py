"""Statistics on simulated pairs: the interval covers, nothing is kept by luck, drift cancels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optimizer.measure.stats import (
    LOOKS,
    MIN_MARGIN,
    conclude,
    decide,
    interleaving,
    mean_interval,
    noise_floor,
    paired_ratio,
    percentile,
)
from optimizer.records import State


def test_the_ratio_and_its_interval_are_exact_on_known_pairs() -> None:
    estimate = paired_ratio([1.0, 4.0])
    # mean of logs ln 2, standard error ln 2, t(1) at 97.5% is 12.7062
    assert estimate.ratio == pytest.approx(2.0)
    assert estimate.ci_high == pytest.approx(math.exp(math.log(2) * (1 + 12.7062)), rel=1e-4)
    assert (estimate.pairs, estimate.ratios) == (2, (1.0, 4.0))
    assert paired_ratio([1.5] * 5).ci_low == pytest.approx(1.5)
    inverse = paired_ratio([1.0, 0.25])
    assert inverse.ratio == pytest.approx(1 / estimate.ratio) and inverse.ci_low == pytest.approx(1 / estimate.ci_high)


@pytest.mark.parametrize("ratios", [[], [1.2], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_an_interval_of_nothing_or_of_nonsense_is_refused(ratios) -> None:
    with pytest.raises(ValueError):
        paired_ratio(ratios)


def test_percentiles_are_linear_between_ranks() -> None:
    assert (
        percentile([1, 2, 3, 4], 50) == 2.5
        and percentile(list(range(101)), 99) == 99
        and math.isnan(percentile([], 50))
    )
    assert mean_interval([3.0]) == (3.0, 3.0, 3.0) and mean_interval([2.0, 8.0])[0] == pytest.approx(4.0)


@pytest.mark.parametrize("pairs", [4, 6, 10])
@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_the_interval_covers_the_true_ratio_95_times_in_100(pairs, noise) -> None:
    rng = np.random.default_rng(11)
    draws = rng.normal(size=(4000, pairs)) if noise == "normal" else rng.standard_t(4, size=(4000, pairs))
    estimates = [paired_ratio(1.4 * np.exp(0.05 * row)) for row in draws]
    covered = np.mean([e.ci_low <= 1.4 <= e.ci_high for e in estimates])
    # Student's t errs on the safe side where noise has heavy tails
    assert 0.94 <= covered <= (0.96 if noise == "normal" else 0.98)


def test_interleaving_cancels_a_steady_drift() -> None:
    speed, ratios, slot = {"a": 100.0, "b": 150.0}, [], 0
    for order in interleaving(8):
        measured = {}
        for side in order:
            measured[side] = speed[side] * math.exp(-0.02 * slot)  # the machine slows by 2% with every window
            slot += 1
        ratios.append(measured["b"] / measured["a"])
    assert interleaving(3) == [("a", "b"), ("b", "a"), ("a", "b")]
    assert paired_ratio(ratios).ratio == pytest.approx(1.5)
    assert paired_ratio(ratios[::2]).ratio < 1.48, "in one order only, the drift would have counted"


def test_the_noise_floor_grows_with_noise_and_with_bias_and_has_a_least_value() -> None:
    rng = np.random.default_rng(3)
    quiet, loud = (noise_floor(np.exp(sd * rng.normal(size=20))) for sd in (0.001, 0.05))
    biased = noise_floor(1.03 * np.exp(0.001 * rng.normal(size=20)))
    assert quiet.margin == MIN_MARGIN and 0.01 < loud.margin < 0.1 and 0.03 < biased.margin < 0.04
    assert loud.spread == pytest.approx(0.05, rel=0.4) and loud.pairs == 20


def run(
    rng: np.random.Generator, true_ratio: float, margin: float, sd: float = 0.04
) -> tuple[State | None, int, object]:
    ratios: list[float] = []
    while True:
        ratios.append(true_ratio * math.exp(sd * rng.normal()))
        decision = decide(ratios, margin)
        if decision.done:
            return decision.state, len(ratios), decision.estimate


def test_looking_often_keeps_no_more_false_gains_than_promised() -> None:
    rng = np.random.default_rng(5)
    for true_ratio in (1.0, 1.02):  # no gain at all, and a gain of exactly the margin
        kept = np.mean([run(rng, true_ratio, margin=0.02)[0] is State.KEEP for _ in range(1500)])
        assert kept <= 0.025


def test_a_naive_interval_at_every_look_would_break_that_promise() -> None:
    rng = np.random.default_rng(5)

    def kept_by_peeking() -> bool:
        ratios = np.exp(0.04 * rng.normal(size=LOOKS[-1]))
        return any(paired_ratio(ratios[:n]).ci_low > 1 for n in range(2, LOOKS[-1] + 1))

    assert np.mean([kept_by_peeking() for _ in range(400)]) > 0.06


def test_clear_answers_come_early_and_intervals_hold_although_stopped() -> None:
    rng = np.random.default_rng(6)
    runs = [run(rng, 1.3, margin=0.01) for _ in range(400)]
    assert np.mean([state is State.KEEP for state, _, _ in runs]) > 0.99 and np.mean([n for _, n, _ in runs]) < 7
    assert np.mean([e.ci_low <= 1.3 <= e.ci_high for _, _, e in runs]) >= 0.95
    slow = [run(rng, 0.8, margin=0.01) for _ in range(200)]
    assert np.mean([state is State.DISCARD for state, _, _ in slow]) > 0.99 and np.mean([n for _, n, _ in slow]) < 7


def test_what_stays_open_is_marginal_or_to_be_retested() -> None:
    flat = [1.008, 1.0081] * 14
    assert decide(flat, margin=0.01).state is State.DISCARD
    spread = [1.02 * math.exp(s) for s in (0.03, -0.03)] * 14
    assert decide(spread, margin=0.01) == decide([*spread, 9.0], margin=0.01), "pairs past the last look change nothing"
    assert decide(spread, margin=0.015).state is State.MARGINAL
    assert decide([1.0 * math.exp(s) for s in (0.3, -0.3)] * 14, margin=0.01).state is State.RETEST
    assert decide([1.3, 1.3]).state is None and not decide([1.3, 1.31, 1.29]).done


def test_a_measurement_cut_short_is_judged_on_what_there_is() -> None:
    assert conclude([1.4, 1.41, 1.39, 1.4, 1.4]).state is State.KEEP
    assert conclude([1.4, 0.9]).state is State.RETEST and conclude([1.4, 0.9]).done
