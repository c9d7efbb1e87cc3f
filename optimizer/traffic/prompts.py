"""Synthetic prompts of a given shape. Content is English from the standard library's help topics, cut by a seed.

A prompt's first tokens are drawn apart from the rest, so two seeds never share a prefix long enough for a prefix cache.
Requests of one prefix group share exactly their first `prefix_len` tokens, within one `scope`: what warms a server up
uses another scope than what is measured, so warm-up cannot fill the cache of measured requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from optimizer.traffic.profile import RequestShape

T = TypeVar("T")
HEAD = 6  # tokens drawn one by one: over 1e30 heads from a source of 100,000 tokens
SEGMENT = 96  # tokens taken in a row from the source


@cache
def source_text() -> str:
    """About 465,000 characters of English and code."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def source_ids(encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """The source text in a model's own tokens: made once for a run, then passed to `prompt_ids`."""
    return tuple(encode(source_text()))


def prompt_ids(shape: RequestShape, seed: int | str, source: Sequence[int], scope: str = "measured") -> list[int]:
    """`shape.isl` token ids, fresh for every seed but for the shared prefix of its group."""
    shared = _draw(f"{scope}|group {shape.prefix_group}", shape.prefix_len, source) if shape.prefix_len else []
    return shared + _draw(f"{scope}|own {seed}", shape.isl - len(shared), source)


def prompt_text(shape: RequestShape, seed: int | str, tokens_per_word: float, scope: str = "measured") -> str:
    """A prompt of about `shape.isl` tokens for a server whose tokenizer is not at hand."""
    words = _words()
    shared = max(0, round(shape.prefix_len / tokens_per_word))
    own = max(1, round(shape.isl / tokens_per_word) - shared)
    head = _draw(f"{scope}|group {shape.prefix_group}", shared, words) if shared else []
    return " ".join([*head, *_draw(f"{scope}|own {seed}", own, words)])


@cache
def _words() -> tuple[str, ...]:
    return tuple(source_text().split())


def _draw(seed: str, n: int, source: Sequence[T]) -> list[T]:
    rng = random.Random(seed)
    drawn = [source[rng.randrange(len(source))] for _ in range(min(HEAD, n))]
    while len(drawn) < n:
        start = rng.randrange(max(1, len(source) - SEGMENT))
        drawn += source[start : start + SEGMENT]
    return drawn[:n]
