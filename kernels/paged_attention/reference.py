"""Grouped-query attention over the packed paged cache in plain torch, float32.

Cache of one layer: keys [blocks, kv_heads, head_dim / n, block_size, n] and values [blocks, kv_heads, block_size / n, head_dim, n], n
being 2. A cache of 8-bit integers has n = 4 and two more tensors, bf16 [blocks, kv_heads, block_size]: the scale of each key and of
each value, which stand for level * scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> int8 levels [..., head_dim] and bf16 scale [...], rounded so that the largest is not cut off."""
    largest = x.float().abs().amax(-1)
    scale = (largest / 127.0).bfloat16()
    cut = scale.float() * 127.0 < largest
    scale = torch.where(cut, (scale.view(torch.int16) + 1).view(torch.bfloat16), scale)
    levels = (x.float() / scale.float()[..., None]).round()
    return torch.where(scale[..., None] > 0, levels, 0.0).to(torch.int8), scale


def write_cache(cache: Sequence[Tensor], slot: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k, v [T, kv_heads, head_dim] at `slot` [T] (block * block_size + offset)."""
    (keys, values), scales = cache[:2], cache[2:]
    size, n = keys.shape[3], keys.shape[4]
    block, at = slot // size, slot % size
    if scales:
        (k, scales[0][block, :, at]), (v, scales[1][block, :, at]) = quantise(k), quantise(v)
    keys[block, :, :, at] = k.unflatten(-1, (-1, n)).to(keys.dtype)
    values[block, :, at // n, :, at % n] = v.to(values.dtype)


def read_cache(cache: Sequence[Tensor], table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first `tokens` keys and values of a sequence, float32 [tokens, kv_heads, head_dim]."""
    (keys, values), scales = cache[:2], cache[2:]
    blocks = table[: -(-tokens // keys.shape[3])].long()
    k = keys[blocks].permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)  # [blocks * size, kv_heads, head_dim]
    v = values[blocks].permute(0, 2, 4, 1, 3).flatten(0, 2)
    by_token = [s[blocks].transpose(1, 2).flatten(0, 1)[:tokens, :, None].float() for s in scales] or [1.0, 1.0]
    return k[:tokens].float() * by_token[0], v[:tokens].float() * by_token[1]


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
