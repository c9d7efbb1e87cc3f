"""Sampling: the right tokens, the right frequencies, and the same draw whoever shares the batch."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.sampler import adjust, sample, uniform
from engine.wire import SampleRow

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
VOCAB = LOGITS.shape[1]


def ids(*tokens: int) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def drawn(count: int = 4000, **row: float) -> Counter[int]:
    """Tokens drawn from LOGITS with one seed, as a request of `count` tokens draws them."""
    rows = [SampleRow(seed=7, draw=i, **row) for i in range(count)]  # type: ignore[arg-type]
    return Counter(sample(LOGITS.expand(count, -1), rows).token_ids)


def chi_square_p(found: Counter[int], probabilities: torch.Tensor) -> float:
    total = sum(found.values())
    kept = [i for i in range(VOCAB) if probabilities[i] > 0]
    return float(stats.chisquare([found[i] for i in kept], [float(probabilities[i]) * total for i in kept]).pvalue)


def test_zero_temperature_takes_the_best() -> None:
    assert sample(LOGITS, [SampleRow(temperature=0)]).token_ids == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_with_the_softmax_s_frequencies(temperature: float) -> None:
    expected = torch.softmax(LOGITS[0].double() / temperature, -1)
    assert chi_square_p(drawn(temperature=temperature), expected) > 1e-3


def test_a_wrong_temperature_would_be_seen() -> None:
    assert chi_square_p(drawn(temperature=1.2), torch.softmax(LOGITS[0].double(), -1)) < 1e-3


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 99}, set(range(VOCAB))),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.57}, {0, 1}),  # the first holds 0.561: the nucleus is the fewest that reach top_p
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.93}, {0, 1, 2}),
    ],
)
def test_filters_keep_the_right_tokens_in_their_proportions(row: dict[str, float], kept: set[int]) -> None:
    found = drawn(**row)
    assert set(found) <= kept and (set(found) == kept or len(kept) == VOCAB)
    probabilities = torch.softmax(LOGITS[0].double(), -1)
    mask = torch.tensor([i in kept for i in range(VOCAB)])
    if len(kept) > 1:
        assert chi_square_p(found, probabilities * mask / (probabilities * mask).sum()) > 1e-3


def test_the_nucleus_ends_exactly_where_top_p_is_reached() -> None:
    first = float(torch.softmax(LOGITS[0].double(), -1)[0])
    assert set(drawn(top_p=first - 1e-6)) == {0}
    assert set(drawn(top_p=first + 1e-6)) == {0, 1}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(-(2**70), 2**70), draw=st.integers(0, 10**6), place=st.integers(0, 3))
def test_a_draw_does_not_depend_on_who_shares_the_batch(seed: int, draw: int, place: int) -> None:
    row = SampleRow(seed=seed, draw=draw)
    alone = sample(LOGITS, [row]).token_ids[0]
    rows = [SampleRow(seed=i, temperature=0.5 * i) for i in range(4)]
    rows[place] = row
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(place))
    logits[place] = LOGITS[0]
    assert sample(logits, rows).token_ids[place] == alone


def test_the_numbers_are_uniform_and_named_by_seed_and_draw() -> None:
    values = [uniform(seed, i) for seed in range(20) for i in range(200)]
    assert len(set(values)) == len(values) and all(0 <= v < 1 for v in values)
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


def test_bias_and_bans() -> None:
    assert sample(LOGITS, [SampleRow(temperature=0, logit_bias={4: 100.0})]).token_ids == [4]
    assert sample(LOGITS, [SampleRow(temperature=0, logit_bias={0: -100.0})]).token_ids == [1]
    assert sample(LOGITS, [SampleRow(temperature=0, banned=[0, 1])]).token_ids == [2]
    assert 0 not in Counter(
        sample(LOGITS.expand(500, -1), [SampleRow(draw=i, banned=[0]) for i in range(500)]).token_ids
    )


def test_adjusting_one_row_leaves_the_logits_alone() -> None:
    before = LOGITS.clone()
    sample(LOGITS, [SampleRow(temperature=0, banned=[0], logit_bias={1: 3.0}, presence_penalty=1.0, output_ids=ids(2))])
    assert torch.equal(LOGITS, before)


def test_penalties_are_the_published_ones() -> None:
    """Presence and frequency as OpenAI's reference writes them, repetition as CTRL does; by hand."""
    row = SampleRow(presence_penalty=0.5, frequency_penalty=0.25, prompt_ids=ids(1), output_ids=ids(0, 0, 4))
    assert adjust(LOGITS[0].clone(), row).tolist() == [2.0 - 0.5 - 0.5, 1.0, 0.5, 0.0, -1.0 - 0.5 - 0.25, -3.0]
    row = SampleRow(repetition_penalty=2.0, prompt_ids=ids(1, 5), output_ids=ids(0))
    assert adjust(LOGITS[0].clone(), row).tolist() == [1.0, 0.5, 0.5, 0.0, -1.0, -6.0]
    none_yet = SampleRow(presence_penalty=1.0, prompt_ids=ids(0))
    assert torch.equal(adjust(LOGITS[0].clone(), none_yet), LOGITS[0])


def test_logprobs_are_of_the_model_s_own_distribution() -> None:
    expected = torch.log_softmax(LOGITS[0], -1)
    done = sample(LOGITS, [SampleRow(temperature=0.1, top_k=1, logprobs=3)])
    assert done.logprobs[0] == pytest.approx(float(expected[0]), abs=1e-6)
    assert [i for i, _ in done.top[0]] == [0, 1, 2]
    assert [v for _, v in done.top[0]] == pytest.approx(expected[:3].tolist(), abs=1e-6)
    chosen_only = sample(LOGITS, [SampleRow(temperature=0, logprobs=0)])
    assert chosen_only.top == [[]] and not math.isnan(chosen_only.logprobs[0])
    unasked = sample(LOGITS, [SampleRow(temperature=0)])
    assert math.isnan(unasked.logprobs[0])
    assert len(sample(LOGITS, [SampleRow(logprobs=99)]).top[0]) == VOCAB
