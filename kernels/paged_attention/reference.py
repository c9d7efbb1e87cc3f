"""Grouped-query attention over the packed paged cache in plain torch, float32.

Cache of one layer: keys [blocks, kv_heads, head_dim / 2, block_size, 2], values [blocks, kv_heads, block_size / 2, head_dim, 2].
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_cache(keys: Tensor, values: Tensor, slot: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k, v [T, kv_heads, head_dim] at `slot` [T] (block * block_size + offset)."""
    size = keys.shape[3]
    block, at = slot // size, slot % size
    keys[block, :, :, at] = k.unflatten(-1, (-1, 2)).to(keys.dtype)
    values[block, :, at // 2, :, at % 2] = v.to(values.dtype)


def read_cache(keys: Tensor, values: Tensor, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first `tokens` keys and values of a sequence, float32 [tokens, kv_heads, head_dim]."""
    size = keys.shape[3]
    blocks = table[: -(-tokens // size)].long()
    k = keys[blocks].permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)  # [blocks * size, kv_heads, head_dim]
    v = values[blocks].permute(0, 2, 4, 1, 3).flatten(0, 2)
    return k[:tokens].float(), v[:tokens].float()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last len(q) tokens: float32 [n, heads, head_dim].

    q [n, heads, head_dim]; k and v float32 [tokens, kv_heads, head_dim].
    """
    n, tokens, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    position, mine = (torch.arange(first, tokens, device=q.device) for first in (0, tokens - n))
    hidden = position > mine[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
