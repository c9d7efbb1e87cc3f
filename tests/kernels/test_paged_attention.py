"""Paged attention: head sizes, groups, contexts at block and span borders, poison, chunking, company."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.host import filling
from kernels.paged_attention import reference
from tests.kernels import support
from tests.kernels.contract import KernelContract


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens in the cache after the step, query tokens)."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of whole contexts, [tokens of all sequences, heads, head_dim]."""
        g = torch.Generator().manual_seed(self.head_dim + self.heads)
        total = sum(n for n, _ in self.lengths)
        shapes = [(total, h, self.head_dim) for h in (self.heads, self.kv_heads, self.kv_heads)]
        return tuple(torch.randn(s, generator=g).bfloat16() for s in shapes)  # type: ignore[return-value]

    def starts(self) -> list[int]:
        return [sum(n for n, _ in self.lengths[:i]) for i in range(len(self.lengths))]


def blocks_for(case: Case, size: int) -> list[list[int]]:
    """Scattered block tables: neighbours in memory belong to other sequences."""
    counts = [-(-n // size) for n, _ in case.lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    return [[order.pop() for _ in range(n)] for n in counts]


def run(library: ctypes.CDLL, case: Case, threads: int, size: int, poison: float = 0.0) -> Tensor:
    """The step's output rows, the earlier tokens having been written by torch. Unused cache holds `poison`."""
    attention = support.glue("paged_attention").PagedAttention(
        library, case.heads, case.kv_heads, case.head_dim, threads, size
    )
    tables = blocks_for(case, size)
    pools = attention.allocate(max(max(t) for t in tables) + 2, 2)
    cache = [pool.fill_(filling(pool, poison))[:, 1] for pool in pools]
    q, k, v = case.tensors()
    rows = []
    for (n, new), start, table in zip(case.lengths, case.starts(), tables, strict=True):
        old = torch.arange(n - new)
        slots = torch.tensor(table)[old // size] * size + old % size
        reference.write_cache(cache, slots, k[start : start + n - new], v[start : start + n - new])
        rows += range(start + n - new, start + n)
    batch = support.step(
        [([0] * new, n - new, table) for (n, new), table in zip(case.lengths, tables, strict=True)], size
    )
    return attention(q[rows], k[rows], v[rows], batch, cache)


class TestPagedAttention(KernelContract):
    op = "paged_attention"
    cases = {
        **{f"head size {d}": Case(((45, 1), (45, 7)), head_dim=d) for d in (16, 32, 64, 80, 128)},
        "one head of keys": Case(((70, 1), (33, 5)), heads=16, kv_heads=1),
        "no groups": Case(((70, 1), (33, 5)), heads=3, kv_heads=3),
        "group of seven": Case(((70, 1), (33, 5)), heads=14, kv_heads=2),
        "block borders": Case(
            tuple((n, 1) for n in (1, 2, 15, 16, 17, 31, 32, 33, 64)), heads=9, kv_heads=3, head_dim=64
        ),
        "span borders": Case(tuple((n, 1) for n in (255, 256, 257, 511, 512, 513)), heads=3, kv_heads=1),
        "prefill over span borders": Case(((300, 300), (520, 11))),
        "mixed": Case(((1, 1), (300, 1), (290, 60), (33, 33), (513, 2), (64, 64)), heads=9, kv_heads=3, head_dim=64),
    }
    mixed = "mixed"

    def run(self, library: ctypes.CDLL, case: Any, threads: int, block_size: int = 32) -> list[Tensor]:
        return [run(library, case, threads, block_size)]

    def expected(self, case: Any, values: Mapping[str, int] = {}) -> list[Tensor]:
        q, k, v = case.tensors()
        if values.get("PM_KV_BITS") == 8:  # what is left after rounding: nothing else may be lost
            k, v = (levels * scale.float()[..., None] for levels, scale in map(reference.quantise, (k, v)))
        parts = zip(case.lengths, case.starts(), strict=True)
        ends = [(s, s + n, new) for (n, new), s in parts]
        return [
            torch.cat(
                [
                    reference.attend(q[e - new : e], k[s:e].float(), v[s:e].float(), case.head_dim**-0.5)
                    for s, e, new in ends
                ]
            )
        ]

    @pytest.mark.parametrize("isa", support.instruction_sets())
    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
    def test_no_bit_of_unused_cache_reaches_the_result(self, isa: str, poison: float) -> None:
        library = support.library_for(self.op, isa, self.values)
        for name in ("block borders", "mixed"):
            assert torch.equal(run(library, self.cases[name], 2, 32), run(library, self.cases[name], 2, 32, poison)), (
                name
            )

    @pytest.mark.parametrize("size", [16, 32, 64, 256])
    def test_block_sizes_are_right_and_agree_to_the_bit(self, size: int) -> None:
        library, case = self.build(), self.cases["mixed"]
        got = run(library, case, 2, size)
        self.check([got], self.expected(case, self.values))
        if size <= 64:
            assert torch.equal(got, run(library, case, 2, 32))

    def test_chunked_and_whole_prefill_agree_to_the_bit(self) -> None:
        library = self.build()
        whole = run(library, Case(((300, 300),)), 2, 32)
        for new in (1, 2, 3, 4, 31, 45, 299):
            assert torch.equal(run(library, Case(((300, new),)), 2, 32), whole[300 - new :]), new

    def test_neighbours_change_no_bit(self) -> None:
        library = self.build()
        alone = run(library, Case(((290, 2),)), 2, 32)
        crowd = Case(((290, 2), (33, 33), (7, 1)))
        assert torch.equal(run(library, crowd, 2, 32)[:2], run(library, Case(((290, 2), (33, 5), (7, 1))), 1, 32)[:2])
        q, k, v = crowd.tensors()
        assert alone.shape == (2, 4, 32) and len(q) == 330 and len(k) == len(v)

    def test_what_it_cannot_do_is_refused_by_name(self) -> None:
        make = support.glue(self.op).PagedAttention
        with pytest.raises(ValueError, match="head_dim must be a multiple of 16"):
            make(self.build(), 4, 2, 40, 1)
        with pytest.raises(ValueError, match="block size must be a multiple of 16"):
            make(self.build(), 4, 2, 32, 1, 24)
        attention, step = make(self.build(), 4, 2, 32, 1), support.step([([0], 0, [0])], 32)
        with pytest.raises(ValueError, match="bfloat16 queries"):
            attention(torch.zeros(1, 4, 32), None, None, step, [t[:, 0] for t in attention.allocate(1, 1)])
        with pytest.raises(ValueError, match="a cache of torch"):
            attention(torch.zeros(1, 4, 32).bfloat16(), None, None, step, 2 * [torch.zeros(1, 2, 16, 32, 2)])


class TestCacheOfIntegers(TestPagedAttention):
    """The same promises of a cache in 8 bits, and those of its scales."""

    values = {"PM_KV_BITS": 8}
    cases = {
        **TestPagedAttention.cases,
        "head size 96": Case(((45, 1), (45, 7)), heads=6, head_dim=96),
        "head size 256": Case(((45, 1), (45, 7)), head_dim=256),
    }

    def close(self, got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-2, atol=4e-3)  # the output's own bf16

    @pytest.mark.parametrize("isa", support.instruction_sets())
    def test_the_cache_holds_the_references_levels_and_scales_to_the_bit(self, isa: str) -> None:
        library, g = support.library_for(self.op, isa, self.values), torch.Generator().manual_seed(2)
        for dim in (16, 80, 128):
            attention = support.glue(self.op).PagedAttention(library, 4, 2, dim, 2)
            batch = support.step([([0] * 45, 0, [3, 1])], 32)
            q, k, v = (torch.randn(45, heads, dim, generator=g).bfloat16() for heads in (4, 2, 2))
            k[7], v[8, 1], k[9] = 0.0, 1e-30, k[9] * 1e4
            got, want = ([t[:, 0] for t in attention.allocate(4, 1)] for _ in range(2))
            attention(q, k, v, batch, got)
            reference.write_cache(want, batch.slot, k, v)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), dim

    def test_a_block_that_is_copied_takes_its_scales_along(self) -> None:
        attention = support.glue(self.op).PagedAttention(self.build(), 4, 2, 64, 2)
        pools, g = attention.allocate(8, 1), torch.Generator().manual_seed(3)
        cache = [t[:, 0] for t in pools]
        q, k, v = (torch.randn(60, heads, 64, generator=g).bfloat16() for heads in (4, 2, 2))
        here = attention(q, k, v, support.step([([0] * 60, 0, [1, 2])], 32), cache)
        for pool in pools:  # dimension 0 of every tensor is the block
            pool[[6, 4]] = pool[[1, 2]]
            pool[[1, 2]] = filling(pool, float("nan"))
        assert torch.equal(attention(q, None, None, support.step([([0] * 60, 0, [6, 4])], 32), cache), here)

    def test_queries_and_values_that_are_not_finite_are_not_hidden(self) -> None:
        attention = support.glue(self.op).PagedAttention(self.build(), 4, 2, 64, 1)
        for which in (0, 2):
            for bad in (float("nan"), float("inf")):
                q, k, v = (torch.ones(3, heads, 64).bfloat16() for heads in (4, 2, 2))
                (q, k, v)[which][1, :, 5] = bad
                cache = [t[:, 0] for t in attention.allocate(1, 1)]
                out = attention(q, k, v, support.step([([0] * 3, 0, [0])], 32), cache)
                assert out[1].isnan().all() and out[0].isfinite().all()
