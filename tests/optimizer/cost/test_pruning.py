"""Replayed pruning: a perfect prediction loses nothing, a reversed one everything, and noise is not a loss."""

from __future__ import annotations

import random

import pytest

from optimizer.cost.pruning import Moment, prune_moments, replay_pruning

MEASURED = [0.8 + 0.02 * i for i in range(40)]


def test_perfect_predictions_lose_no_winner() -> None:
    found = replay_pruning(MEASURED, MEASURED)
    assert (found.searches, found.lost, found.lost_share) == (50, 0, 0.0) and found.gain_kept == pytest.approx(1.0)


def test_reversed_predictions_lose_every_winner() -> None:
    found = replay_pruning([-m for m in MEASURED], MEASURED)
    assert found.lost_share == 1.0 and found.gain_kept < 0.8


def test_predictions_that_know_nothing_lose_half() -> None:
    rng = random.Random(3)
    guesses = [[rng.random() for _ in MEASURED] for _ in range(40)]
    lost = [replay_pruning(g, MEASURED, searches=20, budget=10).lost_share for g in guesses]
    assert 0.35 < sum(lost) / len(lost) < 0.65


def test_good_predictions_with_some_noise_lose_few() -> None:
    rng = random.Random(3)
    found = replay_pruning([m * rng.lognormvariate(0, 0.08) for m in MEASURED], MEASURED, searches=200)
    assert found.lost_share <= 0.02


def test_a_winner_within_the_noise_of_another_is_not_lost() -> None:
    measured, predicted = [1.0, 1.0, 1.0, 2.0, 2.01], [0.1, 0.2, 0.3, 0.9, 0.5]
    assert replay_pruning(predicted, measured, keep=0.2, budget=5).lost_share == 1.0
    assert replay_pruning(predicted, measured, keep=0.2, budget=5, noise=0.01).lost == 0


def test_equal_seeds_replay_equally() -> None:
    rng = random.Random(3)
    predicted = [rng.random() for _ in MEASURED]
    assert replay_pruning(predicted, MEASURED, seed=4) == replay_pruning(predicted, MEASURED, seed=4)
    assert replay_pruning(predicted, MEASURED, seed=4) != replay_pruning(predicted, MEASURED, seed=5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"predicted": [1.0]},
        {"measured": [0.0] * 40},
        {"budget": 41},
        {"keep": 0.0},
        {"searches": 0},
    ],
)
def test_what_cannot_be_replayed_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError):
        replay_pruning(**{"predicted": MEASURED, "measured": MEASURED} | wrong)


def test_a_search_pruned_as_it_went_loses_a_winner_that_was_predicted_among_the_worse_half() -> None:
    kept = [Moment(0, 1, 1.0), Moment(0, 2, 3.0), Moment(3, 4, 1.2), Moment(1, 4, 3.1)]
    lost = [Moment(0, 1, 1.0), Moment(0, 2, 3.0), Moment(2, 4, 3.1)]
    found = prune_moments([kept, lost])
    assert (found.searches, found.lost, found.lost_share) == (2, 1, 0.5)
    assert found.pruned == pytest.approx(2 / 7) and found.gain_kept == pytest.approx((1 + 3.0 / 3.1) / 2)
    assert prune_moments([kept, lost], noise=0.04).lost == 0


def test_equal_predictions_prune_nothing() -> None:
    assert prune_moments([[Moment(0, n, 1.0 + n) for n in (1, 2, 3)]]).pruned == 0.0


def test_searches_that_measured_nothing_are_refused() -> None:
    for searches in ([], [[]]):
        with pytest.raises(ValueError):
            prune_moments(searches)
