"""The launches that every operator makes with default parameters at the shapes of an 8B model, for ahead-of-time compilation.

Nothing runs: tensors are on the meta device and launches are recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fp8_matmul.triton import FP8, fp8_linear
from kernels.gated_mlp.triton import gate_of_both, gated
from kernels.gpu.launch import Launch, recording
from kernels.kv_copy.triton import copy_blocks, gather_blocks, scatter_blocks
from kernels.lm_head.triton import head_and_argmax
from kernels.moe.triton import experts_mlp, route
from kernels.paged_decode_attention.triton import decode_attention
from kernels.prefill_attention.triton import chunk_attention
from kernels.qkv_rope_kv.triton import rope_and_cache
from kernels.rmsnorm_residual.triton import add_rmsnorm
from kernels.small_m_matmul.triton import matmul
from kernels.weight_only_matmul.triton import GROUP, int4_linear, int8_linear

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, BLOCK_SIZE = 4096, 14336, 32, 8, 128256, 16
HEAD_DIMS = (64, 80, 96, 128)
ROWS = (8, 64, 2048)  # decode, a large decode batch, prefill


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(quick: bool = False) -> list[Launch]:
    """Every launch, in order; many compile to the same kernel. With `quick` fewer shapes, still every kernel."""
    with recording() as record:
        norms()
        for rows in ROWS[:: 2 if quick else 1]:
            products(rows)
        for dim in HEAD_DIMS[:: 3 if quick else 1]:
            attention(dim)
        experts()
        copies()
    return record


def norms() -> None:
    x, weight, ids = meta(8, HIDDEN), meta(HIDDEN), meta(8, dtype=torch.int64)
    add_rmsnorm(meta(VOCAB, HIDDEN), weight, 1e-5, rows=ids)
    add_rmsnorm(x, weight, 1e-5, residual=x)
    add_rmsnorm(x, weight, 1e-5, residual=x, rows=ids, write_sum=False)


def products(rows: int) -> None:
    x, scale = meta(rows, HIDDEN), meta(HIDDEN, dtype=torch.float32)
    for bias in (None, meta(HIDDEN)):
        matmul(x, meta(HIDDEN, HIDDEN), bias)
    gated(x, meta(FFN, HIDDEN), meta(FFN, HIDDEN))
    gate_of_both(meta(rows, 2 * FFN))
    head_and_argmax(x, meta(VOCAB, HIDDEN))
    int8_linear(x, meta(HIDDEN, HIDDEN, dtype=torch.int8), scale)
    int4_scale = meta(HIDDEN, HIDDEN // GROUP, dtype=torch.float32)
    int4_linear(x, meta(HIDDEN, HIDDEN // 2, dtype=torch.uint8), int4_scale)
    fp8_linear(x, meta(HIDDEN, HIDDEN, dtype=FP8), scale)


def attention(dim: int) -> None:
    tokens, blocks, i32, i64 = 64, 4096, torch.int32, torch.int64
    keys, values = meta(blocks, KV_HEADS, BLOCK_SIZE, dim), meta(blocks, KV_HEADS, BLOCK_SIZE, dim)
    tables = meta(8192, dim // 2, dtype=torch.float32)
    positions, index = meta(tokens, dtype=i64), meta(tokens, dtype=i32)
    qkv = meta(tokens, (HEADS + 2 * KV_HEADS) * dim)
    q = rope_and_cache(qkv, tables, tables, positions, positions, keys, values, HEADS)
    table, starts, out = meta(tokens, 512, dtype=i32), meta(tokens + 1, dtype=i32), torch.empty_like(q)
    decode_attention(q, keys, values, table, index, starts, index, out)
    chunk_attention(q, keys, values, table, index, starts, index, tokens, out)


def experts() -> None:
    x, ffn, count = meta(64, HIDDEN), 1024, 64
    routing = route(meta(64, count), 8)
    experts_mlp(x, meta(count, ffn, HIDDEN), meta(count, ffn, HIDDEN), meta(count, HIDDEN, ffn), routing)


def copies() -> None:
    pool, index = meta(64, KV_HEADS, BLOCK_SIZE, 128), meta(8, dtype=torch.int64)
    copy_blocks(pool, pool, index, index)
    scatter_blocks(gather_blocks(pool, index), pool, index)
