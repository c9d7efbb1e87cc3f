"""The head in plain torch, float32: logits and each row's greedy token.

Drawing a token (temperature, top-k, top-p, min-p) is no part of the operator: `engine/sampler.py` does it in float64 by inverse
transform, for the rows that ask for it, after penalties and bans that a kernel does not know.
"""

from __future__ import annotations

from torch import Tensor

from kernels.small_m_matmul.reference import linear


def greedy(logits: Tensor) -> Tensor:
    """logits [R, vocab] -> int64 [R], the first of each row's largest."""
    return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)


def head_and_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, depth], weight [vocab, depth] -> (float32 logits [R, vocab], int64 [R])."""
    logits = linear(x, weight)
    return logits, greedy(logits)
