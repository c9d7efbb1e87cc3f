"""Drafts: where they come from, and that the tokens which are kept have exactly the distribution asked for."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.sampler import sample
from engine.sequence import GenerationRequest, SamplingParams, Sequence
from engine.speculate import PromptLookup, accepted
from engine.wire import SampleRow

LOGITS = torch.tensor([[1.5, 1.0, 0.5, 0.2, -1.0, -2.0], [0.0, 0.8, 1.4, -0.5, 0.9, -1.0]])
VOCAB = LOGITS.shape[1]
ROUNDS = 2500
Accept = Callable[[Tokens[int], Tokens[int]], int]


def sequence(prompt: list[int], output: list[int] | None = None, sampling: SamplingParams | None = None) -> Sequence:
    return Sequence(GenerationRequest(1, prompt, 100, sampling or SamplingParams()), output=output or [])


@pytest.mark.parametrize(
    ("text", "most", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),
        ([1, 2, 3, 4, 9, 1, 2, 3], 9, [4, 9, 1, 2, 3, 4, 9, 1, 2]),  # past its end the copy reads on in itself
        ([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3], 1, [4]),  # a longer end counts for more than a later place
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5]),  # of equal ones the latest
        ([8, 2, 3, 4, 1, 2, 3], 1, [4]),  # the two last tokens, where three were never said
        ([8, 3, 4, 1, 2, 3], 5, []),  # one is too few
        ([7, 7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 1, 2, 1], 4, [2, 1, 2, 1]),
        ([256, 256, 1, 65536, 256, 3, 256, 65536, 256], 1, [3]),  # ids whose bytes match across their ends
        ([5], 4, []),
        ([5, 5], 4, []),
    ],
)
def test_drafts_are_what_followed_the_same_end_before(text: list[int], most: int, drafts: list[int]) -> None:
    for split in (len(text), 1):
        assert PromptLookup(3)(sequence(text[:split], text[split:]), most) == drafts


def test_one_token_is_enough_when_asked_for() -> None:
    assert PromptLookup(1)(sequence([8, 3, 4, 1, 2, 3]), 2) == [4, 1]


def by_hand(text: list[int], ngram: int, most: int) -> list[int]:
    for n in range(min(ngram, len(text) - 1), min(ngram, 2) - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                copy = list(text)
                for i in range(most):
                    copy.append(copy[start + n + i])
                return copy[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from([0, 1, 256, 1 << 16]), min_size=1, max_size=30), ngram=st.integers(1, 4))
def test_the_search_finds_what_a_plain_one_finds(text: list[int], ngram: int) -> None:
    asked = sequence(text[:1])
    for token in text[1:]:  # the text grows as it is searched
        assert PromptLookup(ngram)(asked, 4) == by_hand(asked.tokens(0, asked.length), ngram, 4)
        asked.output.append(token)
    assert PromptLookup(ngram)(asked, 4) == by_hand(text, ngram, 4)


def test_drafts_are_accepted_up_to_the_first_that_is_wrong() -> None:
    assert accepted([], [4]) == 0
    assert [accepted([4, 5], drawn) for drawn in ([9, 5, 6], [4, 9, 6], [4, 5, 6])] == [0, 1, 2]


def test_each_row_takes_the_drafts_before_it_for_said() -> None:
    params = SamplingParams(presence_penalty=1.0, min_tokens=3, seed=5)
    request = GenerationRequest(1, [1], 100, params, eos_ids=(2,))
    rows = Sequence(request, output=[10]).sample_rows((11, 12))
    assert [array("i", r.output_ids).tolist() for r in rows] == [[10], [10, 11], [10, 11, 12]]
    assert [r.draw for r in rows] == [1, 2, 3] and {r.seed for r in rows} == {5}
    assert [r.banned for r in rows] == [[2], [2], []]
    assert [r.follows for r in rows] == [-1, 11, 12]


def test_a_row_after_a_wrong_draft_is_not_sampled() -> None:
    greedy = [SampleRow(temperature=0, follows=f, logprobs=0) for f in (-1, 0, 3, -1)]
    done = sample(LOGITS[[0, 0, 0, 1]], greedy)
    assert done.token_ids == [0, 0, -1, 2] and np.isnan(done.logprobs).tolist() == [False, False, True, False]
    wrong_first = [SampleRow(temperature=0, follows=f) for f in (-1, 4, 0)]
    assert sample(LOGITS[[0, 0, 0]], wrong_first).token_ids == [0, -1, -1]


def target(logits: torch.Tensor, params: SamplingParams, said: list[int]) -> np.ndarray:
    """The processed distribution by hand: penalties and bias, temperature, top-k, then top-p. float64 [vocab]."""
    scores = logits.double().numpy().copy()
    counts = Counter(said)
    for token, count in counts.items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    p = np.exp(scores / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    before = np.cumsum(p[kept]) - p[kept]
    kept = kept[before / p[kept].sum() < params.top_p]
    q = np.zeros(VOCAB)
    q[kept] = p[kept]
    return q / q.sum()


def kept_tokens(params: SamplingParams, draft: int, accept: Accept) -> Counter[tuple[int, ...]]:
    """What ROUNDS steps with one draft keep: (other,) or (draft, next)."""
    rows: list[SampleRow] = []
    for i in range(ROUNDS):
        rows += sequence([1], [3], SamplingParams(**{**as_dict(params), "seed": i})).sample_rows((draft,))
    drawn = sample(LOGITS.repeat(ROUNDS, 1), rows).token_ids
    found: Counter[tuple[int, ...]] = Counter()
    for i in range(0, len(drawn), 2):
        n = accept([draft], drawn[i : i + 2])
        found[(*[draft][:n], drawn[i + n])] += 1
    return found


def as_dict(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}


def p_value(params: SamplingParams, draft: int, accept: Accept = accepted) -> float:
    """Chi-square of what is kept against the law of two tokens, the second seen only after the draft."""
    first, second = target(LOGITS[0], params, [3]), target(LOGITS[1], params, [3, draft])
    expected = {(t,): float(first[t]) for t in range(VOCAB) if t != draft}
    expected |= {(draft, t): float(first[draft] * second[t]) for t in range(VOCAB)}
    cells = [cell for cell, share in expected.items() if share > 0]
    found = kept_tokens(params, draft, accept)
    if set(found) - set(cells):
        return 0.0
    return float(stats.chisquare([found[c] for c in cells], [expected[c] * ROUNDS for c in cells]).pvalue)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=3),
    SamplingParams(presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(logit_bias={4: 2.0}, top_p=0.9, presence_penalty=0.5),
]


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "top-p", "top-k", "penalties", "bias"])
@pytest.mark.parametrize("draft", [0, 4])
def test_what_is_kept_has_the_target_distribution(params: SamplingParams, draft: int) -> None:
    assert p_value(params, draft) > 1e-3


@pytest.mark.parametrize("draft", [0, 1, 4])
def test_a_rule_that_accepts_always_is_caught(draft: int) -> None:
    assert p_value(PARAMS[0], draft, accept=lambda drafts, drawn: len(drafts)) < 1e-6


def test_a_rule_that_keeps_p_whole_after_a_rejection_is_caught() -> None:
    """The usual mistake: a rejected draft is replaced by a draw from p, with the draft still in it."""

    def redraws(params: SamplingParams, draft: int) -> Counter[int]:
        rng, p = np.random.default_rng(0), target(LOGITS[0], params, [3])
        return Counter(int(draft if rng.random() < p[draft] else rng.choice(VOCAB, p=p)) for _ in range(ROUNDS))

    p = target(LOGITS[0], PARAMS[0], [3])
    found = redraws(PARAMS[0], 0)
    assert stats.chisquare([found[t] for t in range(VOCAB)], p * ROUNDS).pvalue < 1e-6


def test_accepting_and_drawing_again_is_the_same_law_as_the_published_rule() -> None:
    """Of the first token: accept the draft with p(draft), else draw from p without it (Leviathan et al., 2023)."""
    params, draft = PARAMS[1], 0
    p = target(LOGITS[0], params, [3])
    rest = np.where(np.arange(VOCAB) == draft, 0, p)
    rng = np.random.default_rng(1)
    published = Counter(
        int(draft if rng.random() < p[draft] else rng.choice(VOCAB, p=rest / rest.sum())) for _ in range(ROUNDS)
    )
    ours: Counter[int] = Counter()
    for cell, count in kept_tokens(params, draft, accepted).items():
        ours[cell[0]] += count
    cells = [t for t in range(VOCAB) if p[t] > 0]
    assert stats.chi2_contingency([[side[t] for t in cells] for side in (published, ours)]).pvalue > 1e-3
