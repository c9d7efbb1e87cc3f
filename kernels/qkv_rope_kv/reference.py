"""Rotary embedding and the cache write in plain torch, float32. Cache: [blocks, kv_heads, block_size, dim]."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, dim]; cos, sin float32 [T, dim / 2] -> float32 [T, heads, dim]. Pairs (d, d + dim / 2)."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rope_and_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    """Rotated queries, float32 [T, heads, dim]; rotated keys and plain values are written at `slots`, negative ones nowhere.

    qkv [T, (heads + 2 kv_heads) * dim], rows of q, k, v one after another; cos, sin float32 [positions, dim / 2]; positions
    and slots int64 [T].
    """
    _, kv_heads, size, dim = keys.shape
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
    cos, sin = cos[positions], sin[positions]
    kept = slots >= 0
    block, at = slots[kept] // size, slots[kept] % size
    keys[block, :, at] = rotate(k, cos, sin)[kept].to(keys.dtype)
    values[block, :, at] = v[kept].to(values.dtype)
    return rotate(q, cos, sin)
