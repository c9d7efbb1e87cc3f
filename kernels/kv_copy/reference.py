"""Copies of whole KV blocks in plain torch. Dimension 0 of a tensor is the block."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(
    source: Tensor, target: Tensor, source_blocks: Tensor | None = None, target_blocks: Tensor | None = None
) -> None:
    """target[target_blocks[i]] = source[source_blocks[i]], int64 [N] each; without an index the blocks are taken in order."""
    index = source_blocks if source_blocks is not None else target_blocks
    in_order = torch.arange(min(len(source), len(target)) if index is None else len(index), device=source.device)
    read, write = (in_order if blocks is None else blocks for blocks in (source_blocks, target_blocks))
    target[write] = source[read]


def gather_blocks(pool: Tensor, blocks: Tensor) -> Tensor:
    """pool [pool blocks, ...], blocks int64 [N] -> [N, ...], a copy."""
    return pool[blocks]


def scatter_blocks(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """Writes buffer [N, ...] to pool[blocks]."""
    pool[blocks] = buffer
