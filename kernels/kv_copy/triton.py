"""Copies whole KV blocks: within a pool, out of it into a buffer (gather), back into a pool (scatter)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.launch import launch


@triton.jit
def kv_copy(
    source, target, source_blocks, target_blocks, size, HAS_SOURCE: tl.constexpr, HAS_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    read = tl.load(source_blocks + item).to(tl.int64) if HAS_SOURCE else item.to(tl.int64)
    write = tl.load(target_blocks + item).to(tl.int64) if HAS_TARGET else item.to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(target + write * size + at, tl.load(source + read * size + at, mask=inside), mask=inside)


def copy_blocks(
    source: Tensor, target: Tensor, source_blocks: Tensor | None = None, target_blocks: Tensor | None = None,
    params: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """target[target_blocks[i]] = source[source_blocks[i]] for tensors whose dimension 0 is the block.

    Without an index (int64 [N]) the blocks are taken in order. No block may be written twice, nor written and read.
    """
    index = source_blocks if source_blocks is not None else target_blocks
    count = min(len(source), len(target)) if index is None else index.shape[0]
    size, p = source[0].numel(), tunables.resolve("kv_copy", params)
    launch(
        kv_copy, (count, triton.cdiv(size, p["BLOCK"])), source, target, source_blocks, target_blocks, size,
        HAS_SOURCE=source_blocks is not None, HAS_TARGET=target_blocks is not None, BLOCK=p["BLOCK"], num_warps=p["WARPS"],
    )  # fmt: skip


def gather_blocks(pool: Tensor, blocks: Tensor) -> Tensor:
    """The named blocks in a buffer of their own, [len(blocks), ...]."""
    buffer = torch.empty((blocks.shape[0], *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    copy_blocks(pool, buffer, source_blocks=blocks)
    return buffer


def scatter_blocks(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """Writes buffer[i] to pool[blocks[i]]."""
    copy_blocks(buffer, pool, target_blocks=blocks)
