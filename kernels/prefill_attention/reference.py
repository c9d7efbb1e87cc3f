"""Causal attention of a chunk of query tokens over a paged cache that holds the chunk too, in plain torch, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention.reference import attend
from kernels.paged_decode_attention.reference import read_cache


def chunk_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, contexts: Tensor, query_start: Tensor, sequences: Tensor
) -> Tensor:
    """All rows of each of `sequences` [P], one sequence after another: float32 [rows, heads, dim].

    The arguments are those of `decode_attention`.
    """
    rows = []
    for s in sequences.tolist():
        k, v = (read_cache(pool, table[s], int(contexts[s])) for pool in (keys, values))
        rows.append(attend(q[query_start[s] : query_start[s + 1]], k, v, q.shape[-1] ** -0.5))
    return torch.cat(rows)
