"""Attention of one query token a sequence over a paged cache in plain torch, float32.

Cache: keys and values [blocks, kv_heads, block_size, dim].
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention.reference import attend


def read_cache(pool: Tensor, table: Tensor, tokens: int) -> Tensor:
    """The first `tokens` keys (or values) of a sequence whose blocks `table` [B] names: float32 [tokens, kv_heads, dim]."""
    blocks = table[: -(-tokens // pool.shape[2])].long()
    return pool[blocks].transpose(1, 2).flatten(0, 1)[:tokens].float()


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, contexts: Tensor, query_start: Tensor, sequences: Tensor
) -> Tensor:
    """The first row of each of `sequences` [D]: float32 [D, heads, dim]. A context of 0 gives zeros.

    q [T, heads, dim]; table int32 [S, B]; contexts int32 [S], the query token included; query_start int32 [S + 1].
    """
    rows = []
    for s in sequences.tolist():
        k, v = (read_cache(pool, table[s], int(contexts[s])) for pool in (keys, values))
        first = int(query_start[s])
        rows.append(attend(q[first : first + 1], k, v, q.shape[-1] ** -0.5))
    return torch.cat(rows)
