"""Synthetic prompts: the right length, fresh content, shared prefixes and nothing else shared."""

from __future__ import annotations

from itertools import pairwise

from optimizer.traffic.profile import RequestShape
from optimizer.traffic.prompts import prompt_ids, prompt_text, source_ids

SOURCE = source_ids(lambda text: [ord(c) for c in text])


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_prompt_has_exactly_the_length_asked_for_and_repeats_by_seed_only() -> None:
    for isl in (1, 5, 6, 7, 102, 103, 5000):
        assert len(prompt_ids(RequestShape(0, isl, 1), "s", SOURCE)) == isl
    shape = RequestShape(0, 300, 1)
    assert prompt_ids(shape, "a", SOURCE) == prompt_ids(shape, "a", SOURCE)


def test_no_two_prompts_share_a_prefix_that_a_block_cache_could_hold() -> None:
    prompts = sorted(prompt_ids(RequestShape(0, 64, 1), i, SOURCE) for i in range(3000))
    assert max(common(a, b) for a, b in pairwise(prompts)) < 16


def test_requests_of_a_group_share_their_prefix_and_not_a_token_of_plan_more() -> None:
    a, b, other = (prompt_ids(RequestShape(0, 200, 1, g, 120), s, SOURCE) for g, s in ((0, 1), (0, 2), (1, 1)))
    assert 120 <= common(a, b) < 126 and common(a, other) < 6


def test_a_warm_up_of_another_scope_shares_no_prefix_with_what_is_measured() -> None:
    shape = RequestShape(0, 200, 1, 0, 120)
    assert common(prompt_ids(shape, 1, SOURCE, "warmup"), prompt_ids(shape, 1, SOURCE, "measured")) < 6


def test_a_text_prompt_has_about_the_words_asked_for() -> None:
    shape = RequestShape(0, 300, 1, 0, 150)
    a, b = (prompt_text(shape, s, 1.5).split(" ") for s in (1, 2))
    assert len(a) == len(b) == 200 and a[:100] == b[:100] and a[100:] != b[100:]
