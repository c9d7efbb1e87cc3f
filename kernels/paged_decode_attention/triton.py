"""Attention of one query token a sequence over its paged cache. A context is split into pieces that run side by side (split-K);
a second kernel merges them. All query heads of a KV head share one read of its keys and values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.attention_tiles import attend, cached
from kernels.gpu.launch import launch, power_of_two, precision

LOG2_E = 1.4426950408889634
PROGRAMS_WANTED = 512  # about four for each multiprocessor of a large GPU
MAX_SPLITS = 64


@triton.jit
def paged_decode_attention(
    q, keys, values, table, contexts, query_start, sequences, parts, weights, scale, heads, kv_heads, width, splits,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + item)
    context = tl.load(contexts + sequence)
    span = tl.cdiv(tl.cdiv(context, splits), BLOCK_N) * BLOCK_N
    first = split * span
    end = tl.minimum(context, first + span)
    member, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    wanted = (member < GROUP)[:, None] & (d < DIM)[None, :]
    head = kv_head * GROUP + member
    row = tl.load(query_start + sequence).to(tl.int64)
    query = tl.load(q + (row * heads + head[:, None]) * DIM + d[None, :], mask=wanted, other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    mixed = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for start in range(first, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < end
        visible = inside[None, :] & (member < BLOCK_H)[:, None]  # all rows: padding of the group is not stored
        at = cached(table + sequence.to(tl.int64) * width, position, inside, kv_head, kv_heads, BLOCK_SIZE, DIM)
        best, total, mixed = attend(
            query, keys, values, at, inside, visible, scale, best, total, mixed, d, DIM, PRECISION
        )
    part = ((item * heads + head) * splits + split).to(tl.int64)
    some = tl.maximum(total, 1e-30)  # an empty piece has weight exp2(-inf) and mixes nothing
    tl.store(parts + part[:, None] * DIM + d[None, :], mixed / some[:, None], mask=wanted)
    tl.store(weights + part, best + tl.log2(some), mask=member < GROUP)


@triton.jit
def merge_splits(
    parts, weights, query_start, sequences, out, heads, splits,
    DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    split, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part = ((item * heads + head) * splits + split).to(tl.int64)
    log_weight = tl.load(weights + part, mask=split < splits, other=float("-inf"))
    best = tl.max(log_weight)
    weight = tl.exp2(log_weight - tl.where(best == float("-inf"), 0.0, best))
    inside = (split < splits)[:, None] & (d < DIM)[None, :]
    piece = tl.load(parts + part[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    mixed = tl.sum(piece * weight[:, None], 0) / tl.maximum(tl.sum(weight), 1e-30)
    row = tl.load(query_start + tl.load(sequences + item)).to(tl.int64)
    tl.store(out + (row * heads + head) * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


def splits_for(items: int, kv_heads: int) -> int:
    """Pieces that fill the device at this number of sequences: a power of two, at most MAX_SPLITS."""
    return power_of_two(min(MAX_SPLITS, max(1, PROGRAMS_WANTED // max(1, items * kv_heads))))


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, contexts: Tensor, query_start: Tensor, sequences: Tensor,
    out: Tensor, params: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Writes `out` [T, heads, dim] at the first row of each of `sequences` (int32 [D]); other rows are left alone.

    q [T, heads, dim]; keys, values [blocks, kv_heads, block_size, dim]; table int32 [S, B]; contexts int32 [S], the query
    token included (0 gives zeros and reads no cache); query_start int32 [S + 1].
    """
    p = tunables.resolve("paged_decode_attention", params)
    (_, heads, dim), (_, kv_heads, block_size, _) = q.shape, keys.shape
    items, group = sequences.shape[0], heads // kv_heads
    splits = p["SPLITS"] or splits_for(items, kv_heads)
    parts = torch.empty((items, heads, splits, dim), dtype=torch.float32, device=q.device)
    weights = torch.empty((items, heads, splits), dtype=torch.float32, device=q.device)
    block_d = power_of_two(dim, 16)
    launch(
        paged_decode_attention, (items, kv_heads, splits),
        q, keys, values, table, contexts, query_start, sequences, parts, weights, dim**-0.5 * LOG2_E,
        heads, kv_heads, table.shape[1], splits,
        DIM=dim, GROUP=group, BLOCK_SIZE=block_size, BLOCK_H=power_of_two(group, 16), BLOCK_N=p["BLOCK_N"],
        BLOCK_D=block_d, PRECISION=precision(q), num_warps=p["WARPS"], num_stages=p["STAGES"],
    )  # fmt: skip
    launch(
        merge_splits, (items, heads), parts, weights, query_start, sequences, out, heads, splits,
        DIM=dim, BLOCK_S=power_of_two(splits), BLOCK_D=block_d,
    )  # fmt: skip
