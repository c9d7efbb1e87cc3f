"""Statistics on simulated pairs: the interval covers, nothing is kept by luck, drift cancels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from optimizer.lab import LOOKS as TIER_ONE_LOOKS
from optimizer.lab import VISITS
from optimizer.measure.stats import (
    LOOKS,
    MIN_MARGIN,
    PRIOR_PAIRS,
    Spread,
    chained,
    conclude,
    decide,
    interleaving,
    mean_interval,
    noise_floor,
    paired_ratio,
    percentile,
)
from optimizer.measure.tiers import Rule
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


def test_a_moderated_interval_leans_on_what_is_known_of_the_scatter() -> None:
    prior = Spread()
    for _ in range(20):
        prior.learn([0.9, 1.0, 1.1, 1.0])
    lucky = [1.2, 1.2001, 1.1999]  # three pairs that happen to agree say little by themselves
    alone, known = paired_ratio(lucky), paired_ratio(lucky, prior=prior)
    assert alone.ci_low > 1.19 and known.ci_low < 1.15 and known.ratio == alone.ratio
    wide = [0.9, 1.2, 1.6]
    assert paired_ratio(wide, prior=prior).ci_low > paired_ratio(wide).ci_low, "and a wild one is not taken for all"
    assert prior.weight == PRIOR_PAIRS and Spread().weight == 0
    Spread().learn([1.0])  # one pair has no scatter


def test_the_chain_has_both_uncertainties() -> None:
    ratio, low, high = chained(paired_ratio([1.0, 1.1, 1.2]), (2.0, 1.8, 2.0 * 2.0 / 1.8))
    own = paired_ratio([1.0, 1.1, 1.2])
    assert ratio == pytest.approx(2 * own.ratio)
    half = math.hypot(math.log(own.ci_high / own.ci_low) / 2, math.log(2.0 / 1.8))
    assert math.log(high / ratio) == pytest.approx(half) and math.log(ratio / low) == pytest.approx(half)


def visited(draw: Callable[[], float], rule: Rule) -> State:
    """A candidate through all its visits."""
    rows: list[float] = []
    while True:
        before = len(rows)
        while not rule.enough(rows, 0.0, before):
            rows.append(draw())
        state = rule.state(rows)
        if state is not State.RETEST or len(rows) >= rule.looks[-1]:
            return state


@pytest.mark.parametrize("heavy", [False, True])
def test_equal_programs_are_hardly_ever_kept_however_often_they_come_back(heavy: bool) -> None:
    """Tier 1's own rule, with a margin of nothing: only the intervals stand between chance and a win."""
    rng = np.random.default_rng(5)
    scatter = (lambda: rng.standard_t(4) * 0.06) if heavy else (lambda: rng.normal() * 0.08)
    prior = Spread()
    for _ in range(30):
        prior.learn([math.exp(scatter()) for _ in range(4)])
    rule = Rule(0.0, TIER_ONE_LOOKS, visits=VISITS, width=0.15, prior=prior)
    states = Counter(visited(lambda: math.exp(scatter()), rule) for _ in range(1500))
    faster = states[State.KEEP] + states[State.MARGINAL]
    assert faster / 1500 <= 0.03, states  # tier 2 confirms what is left by a test of its own
    gain = Counter(visited(lambda: math.exp(scatter() + math.log(1.25)), rule) for _ in range(300))
    assert (gain[State.KEEP] + gain[State.MARGINAL]) / 300 >= 0.8, gain
    slow = Counter(visited(lambda: math.exp(scatter() + math.log(0.8)), rule) for _ in range(300))
    assert slow[State.DISCARD] == 300


def test_what_is_hopeless_is_given_up_at_the_first_look_and_a_visit_ends_at_its_own() -> None:
    rule = Rule(0.05, TIER_ONE_LOOKS, visits=VISITS, width=0.15)
    assert rule.enough([0.5, 0.51], 0.0) and rule.state([0.5, 0.51]) is State.DISCARD
    unsure = [1.0, 1.3, 1.0, 1.3]
    assert not rule.enough(unsure[:2], 0.0) and rule.enough(unsure, 0.0)
    assert rule.state(unsure) is State.RETEST and not rule.enough(unsure, 0.0, before=4)
    assert rule.state([0.99, 1.2, 0.9, 1.1]) is State.DISCARD, (
        "what does not seem faster by more than noise is not retested"
    )
