"""Small random tensors and scattered caches for the Triton operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

POISON = float("nan")  # what lies in cache slots that no kernel may read


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Near as the dtype allows: `got` is the kernel's, `want` float32."""
    tolerance = tolerance or {torch.float32: 2e-5, torch.float16: 3e-3}.get(got.dtype, 2e-2)
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Paged:
    """Sequences as (tokens in the cache, query tokens at their end) over a scattered cache; the rest of it is poison."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def query_start(self) -> Tensor:
        return torch.tensor([0, *(n for _, n in self.lengths)]).cumsum(0).int()

    @property
    def contexts(self) -> Tensor:
        return torch.tensor([n for n, _ in self.lengths], dtype=torch.int32)

    def query(self) -> Tensor:
        return random(int(self.query_start[-1]), self.heads, self.dim, dtype=self.dtype, seed=1)

    def table(self) -> Tensor:
        """Neighbours in memory belong to other sequences; entries past a sequence's end are -1."""
        counts = [-(-n // self.block_size) for n, _ in self.lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)).tolist()
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)])
        return table

    def cache(self) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """(keys, values, each sequence's own [tokens, kv_heads, dim])."""
        table = self.table()
        shape = (int(table.max()) + 2, self.kv_heads, self.block_size, self.dim)
        keys, values = (torch.full(shape, POISON, dtype=self.dtype) for _ in range(2))
        own = []
        for s, (n, _) in enumerate(self.lengths):
            k, v = (random(n, self.kv_heads, self.dim, dtype=self.dtype, seed=10 * s + i) for i in (0, 1))
            at = torch.arange(n)
            blocks = table[s, at // self.block_size].long()
            keys[blocks, :, at % self.block_size], values[blocks, :, at % self.block_size] = k, v
            own.append((k, v))
        return keys, values, own
