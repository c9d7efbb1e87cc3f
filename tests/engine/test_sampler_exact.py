"""The sampler against its slow definition: every token sorted, filters one after the other, in numpy. Equal to the token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampler import adjust, sample, uniform
from engine.wire import SampleRow

ROWS = 40  # random rows of each case
FILTERS = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"top_p": 1 - 1e-7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 300, "min_p": 1e-3, "top_p": 0.99},
]
CHANGES = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.8},
    {"logit_bias": {3: 100.0, 8: -100.0, 11: 4.0}},
    {"banned": [0, 1, 2, 17]},
]


def defined(scores: Tensor, row: SampleRow) -> tuple[np.ndarray, np.ndarray]:
    """Rising ids that are kept and their weights, from a sort of the whole vocabulary; of equals the lower id first."""
    values = scores.double().numpy()
    with np.errstate(over="ignore"):
        weights = np.exp((values - values.max()) / row.temperature)
    order = np.argsort(-values, kind="stable")
    if row.top_k:
        order = order[: row.top_k]
    order = np.sort(order[weights[order] >= row.min_p])
    order = order[np.argsort(-weights[order], kind="stable")]  # a huge temperature ties what scores differ in
    if row.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
        inside = before < row.top_p * weights[order].sum()
        inside[0] = True
        order = order[inside]
    ids = np.sort(order)
    return ids, weights[ids]


def chosen(scores: Tensor, row: SampleRow) -> int:
    ids, weights = defined(scores, row)
    cumulative = np.cumsum(weights)
    return int(ids[np.searchsorted(cumulative, uniform(row.seed, row.draw) * cumulative[-1], side="right")])


def logits(kind: str, rows: int, vocab: int) -> Tensor:
    """Float32 [rows, vocab]: peaked like a model's, flat, or of few levels so that most scores are tied."""
    generator = torch.Generator().manual_seed(vocab)
    values = torch.randn(rows, vocab, generator=generator)
    return {"peaked": 3 * values, "flat": 0.01 * values, "tied": values.round(), "level": torch.zeros(rows, vocab)}[
        kind
    ]


@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "level"])
@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_the_token_is_that_of_the_definition(kind: str, row: dict[str, float]) -> None:
    for temperature in (0.7, 1.0, 2.0):
        rows = [SampleRow(temperature=temperature, seed=5, draw=i, **row) for i in range(ROWS)]  # type: ignore[arg-type]
        scores = logits(kind, ROWS, 1003)
        expected = [chosen(s, r) for s, r in zip(scores, rows, strict=True)]
        assert sample(scores, rows).token_ids == expected


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_so_it_is_over_a_whole_vocabulary(row: dict[str, float]) -> None:
    scores = logits("peaked", 6, 49_152)
    rows = [SampleRow(temperature=0.7, seed=1, draw=i, **row) for i in range(6)]  # type: ignore[arg-type]
    assert sample(scores, rows).token_ids == [chosen(s, r) for s, r in zip(scores, rows, strict=True)]


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-3, 1e3, 1e30])
def test_tiny_and_huge_temperatures(temperature: float) -> None:
    scores = logits("tied", ROWS, 257)
    for row in FILTERS:
        rows = [SampleRow(temperature=temperature, seed=2, draw=i, **row) for i in range(ROWS)]  # type: ignore[arg-type]
        assert sample(scores, rows).token_ids == [chosen(s, r) for s, r in zip(scores, rows, strict=True)]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_penalties_bias_and_bans_come_before_the_filters(change: dict) -> None:
    said = np.asarray([3, 3, 5, 8], np.int32).tobytes()
    scores = logits("peaked", ROWS, 257)
    for row in FILTERS:
        rows = [SampleRow(seed=3, draw=i, prompt_ids=said, output_ids=said, **change, **row) for i in range(ROWS)]
        expected = [chosen(adjust(s.clone(), r), r) for s, r in zip(scores, rows, strict=True)]
        assert sample(scores, rows).token_ids == expected


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_a_token_without_a_chance_is_never_drawn(row: dict[str, float]) -> None:
    """Most of the row at minus infinity, the last ids too: whatever the random number, one of the others comes."""
    scores = torch.full((1, 100), -math.inf)
    scores[0, [7, 30, 31]] = torch.tensor([1.0, 0.0, 0.0])
    for i in range(ROWS):
        wanted = SampleRow(seed=4, draw=i, **row)  # type: ignore[arg-type]
        [token] = sample(scores, [wanted]).token_ids
        assert token in (7, 30, 31) and token == chosen(scores[0], wanted)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_the_ends_of_the_unit_interval(monkeypatch: pytest.MonkeyPatch, number: float, row: dict[str, float]) -> None:
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, draw: number)
    scores = logits("peaked", 1, 257)
    scores[0, :9] = scores[0, -9:] = -math.inf
    [token] = sample(scores, [SampleRow(**row)]).token_ids  # type: ignore[arg-type]
    ids, weights = defined(scores[0], SampleRow(**row))  # type: ignore[arg-type]
    possible = ids[weights > 0]
    assert token in possible
    assert number == 0.5 or token == possible[0 if number == 0 else -1]


def test_a_row_of_nothing_but_banned_tokens_gets_some_token() -> None:
    for row in FILTERS:
        [token] = sample(torch.zeros(1, 9), [SampleRow(banned=list(range(9)), **row)]).token_ids  # type: ignore[arg-type]
        assert 0 <= token < 9


def test_rows_of_equal_settings_do_not_depend_on_their_company() -> None:
    scores = logits("peaked", ROWS, 1003)
    rows = [SampleRow(temperature=0.7, top_p=0.95, seed=i, draw=9) for i in range(ROWS)]
    together = sample(scores, rows).token_ids
    assert together == [sample(scores[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]


def test_rounding_of_the_scores_rarely_changes_a_seeded_draw() -> None:
    """Two versions that differ in rounding draw alike: in the order of the weights near ties would change places."""
    scores = logits("tied", 400, 1003)
    nudged = scores + 1e-5 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    rows = [SampleRow(temperature=0.7, seed=6, draw=i) for i in range(len(scores))]
    one, other = sample(scores, rows).token_ids, sample(nudged, rows).token_ids
    assert sum(a == b for a, b in zip(one, other, strict=True)) > 0.97 * len(rows)
