"""Causal attention of a chunk of query tokens over a paged cache that holds the chunk and everything before it (a cached prefix,
earlier chunks)."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.attention_tiles import attend, cached
from kernels.gpu.launch import launch, power_of_two, precision

LOG2_E = 1.4426950408889634


@triton.jit
def prefill_attention(
    q, keys, values, table, contexts, query_start, sequences, out, scale, heads, kv_heads, width,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.load(sequences + tl.program_id(2))
    first, after = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    context = tl.load(contexts + sequence)
    m, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    wanted = (m < after - first)[:, None] & (d < DIM)[None, :]
    at_rows = ((first + m).to(tl.int64)[:, None] * heads + head) * DIM + d[None, :]
    query = tl.load(q + at_rows, mask=wanted, other=0.0)
    query_position = context - (after - first) + m
    # no key after the tile's last query; an empty tile (a shorter sequence of the batch) has no keys at all
    end = tl.where(
        tile * BLOCK_M < after - first, tl.minimum(context, context - (after - first) + (tile + 1) * BLOCK_M), 0
    )
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < end
        at = cached(table + sequence.to(tl.int64) * width, position, inside, head // GROUP, kv_heads, BLOCK_SIZE, DIM)
        visible = (position[None, :] <= query_position[:, None]) & inside[None, :]
        best, total, mixed = attend(
            query, keys, values, at, inside, visible, scale, best, total, mixed, d, DIM, PRECISION
        )
    mixed = mixed / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + at_rows, mixed.to(out.dtype.element_ty), mask=wanted)


def chunk_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, contexts: Tensor, query_start: Tensor, sequences: Tensor,
    longest: int, out: Tensor, params: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Writes `out` [T, heads, dim] at all rows of each of `sequences` (int32 [P]), none of which has over `longest` query tokens.

    The other arguments are those of `decode_attention`.
    """
    p = tunables.resolve("prefill_attention", params)
    (_, heads, dim), (_, kv_heads, block_size, _) = q.shape, keys.shape
    launch(
        prefill_attention, (triton.cdiv(longest, p["BLOCK_M"]), heads, sequences.shape[0]),
        q, keys, values, table, contexts, query_start, sequences, out, dim**-0.5 * LOG2_E, heads, kv_heads, table.shape[1],
        DIM=dim, GROUP=heads // kv_heads, BLOCK_SIZE=block_size, BLOCK_M=p["BLOCK_M"], BLOCK_N=p["BLOCK_N"],
        BLOCK_D=power_of_two(dim, 16), PRECISION=precision(q), num_warps=p["WARPS"], num_stages=p["STAGES"],
    )  # fmt: skip
