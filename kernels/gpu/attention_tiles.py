"""Device functions of both attention kernels: where a cached token lies, and one tile of keys of the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.dot import dot


@triton.jit
def cached(table, position, inside, kv_head, kv_heads, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr):
    """Offsets (int64) of the tokens at `position` in a cache [blocks, kv_heads, BLOCK_SIZE, DIM]; `table` is a sequence's own."""
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return ((block * kv_heads + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * DIM


@triton.jit
def attend(
    query, keys, values, at, inside, visible, scale, best, total, mixed, d, DIM: tl.constexpr, PRECISION: tl.constexpr
):
    """The softmax state (largest score, sum, mixed values; base 2) after one tile of keys at offsets `at`.

    Keys that are not `inside` are never read, so that what lies in unused slots cannot matter; scores that are not `visible`
    count nothing.
    """
    real = (d < DIM)[:, None]
    k = tl.load(keys + at[None, :] + d[:, None], mask=inside[None, :] & real, other=0.0)
    scores = dot(query, k, tl.zeros(visible.shape, tl.float32), PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
    shrink = tl.exp2(best - base)
    p = tl.exp2(scores - base[:, None])
    v = tl.load(values + at[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    mixed = dot(p.to(v.dtype), v, mixed * shrink[:, None], PRECISION)
    return higher, total * shrink + tl.sum(p, 1), mixed
