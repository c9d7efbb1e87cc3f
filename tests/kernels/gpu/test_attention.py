"""Decode and prefill attention under the interpreter: head sizes, groups, block and split borders, long contexts, chunks, poison."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from kernels import registry
from kernels.paged_decode_attention import reference as one_token
from kernels.paged_decode_attention.triton import decode_attention, splits_for
from kernels.prefill_attention import reference as chunks
from kernels.prefill_attention.triton import chunk_attention
from tests.kernels.gpu.support import Paged, close

DECODE = {
    **{f"head size {d}": Paged(((45, 1), (16, 1)), dim=d) for d in (64, 80, 96, 128)},
    "one KV head, group of eight": Paged(((33, 1), (70, 1)), heads=8, kv_heads=1),
    "no groups": Paged(((33, 1),), heads=3, kv_heads=3),
    "group of three": Paged(((33, 1),), heads=6, kv_heads=2),
    "block borders": Paged(tuple((n, 1) for n in (1, 15, 16, 17, 64, 65)), heads=2, kv_heads=1),
    "bf16": Paged(((45, 1),), dtype=torch.bfloat16),
    "a long context": Paged(((1500, 1),), heads=2, kv_heads=1),
}
PREFILL = {
    **{f"head size {d}": Paged(((40, 40), (33, 7)), dim=d, heads=2, kv_heads=1) for d in (64, 80, 96, 128)},
    "a cached prefix": Paged(((150, 20),), heads=2, kv_heads=1),
    "tile borders": Paged(((64, 64), (65, 65), (130, 1)), heads=1, kv_heads=1),
    "groups": Paged(((20, 5),), heads=6, kv_heads=2),
    "bf16": Paged(((45, 30),), heads=2, kv_heads=1, dtype=torch.bfloat16),
    "a long context": Paged(((900, 10),), heads=1, kv_heads=1),
}


def run(case: Paged, sequences: list[int], kind: str, params: Mapping[str, int] | None = None) -> tuple[Tensor, Tensor]:
    """(the kernel's rows of `sequences`, the reference's). All other rows are checked to be untouched."""
    keys, values, _ = case.cache()
    q = case.query()
    out = torch.full_like(q, 7.0)
    index = torch.tensor(sequences, dtype=torch.int32)
    common = (q, keys, values, case.table(), case.contexts, case.query_start, index)
    if kind == "decode":
        decode_attention(*common, out, {"SPLITS": 4, **(params or {})})
        want = one_token.decode_attention(*common)
    else:
        chunk_attention(*common, max(case.lengths[s][1] for s in sequences), out, params)
        want = chunks.chunk_attention(*common)
    starts = case.query_start.tolist()
    rows = [r for s in sequences for r in range(starts[s], starts[s + 1])]
    untouched = torch.ones(len(q), dtype=torch.bool)
    untouched[rows] = False
    assert bool((out[untouched] == 7).all())
    return out[rows], want


def test_the_reference_reads_each_sequences_own_tokens() -> None:
    case = Paged(((45, 1), (16, 1), (0, 1), (17, 1)))
    keys, values, own = case.cache()
    for s, (count, _) in enumerate(case.lengths):
        for pool, mine in ((keys, own[s][0]), (values, own[s][1])):
            assert torch.equal(one_token.read_cache(pool, case.table()[s], count), mine)


@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_the_reference(name: str) -> None:
    case = DECODE[name]
    close(*run(case, list(range(len(case.lengths))), "decode"))


@pytest.mark.parametrize("splits", [1, 2, 4, 64])
def test_splits_change_nothing_but_rounding(splits: int) -> None:
    """With 64 splits of 100 tokens most are empty."""
    close(*run(Paged(((100, 1), (257, 1)), heads=2, kv_heads=1), [0, 1], "decode", {"SPLITS": splits}))


def test_decode_leaves_other_sequences_rows_alone() -> None:
    close(*run(Paged(((40, 1), (30, 6), (20, 1))), [0, 2], "decode"))


def test_a_padding_row_reads_no_cache_and_gives_zeros() -> None:
    case = Paged(((0, 1), (20, 1)))
    got, want = run(case, [0, 1], "decode")
    assert bool((got[0] == 0).all())
    close(got, want)


def test_more_sequences_take_fewer_splits() -> None:
    assert [splits_for(n, 8) for n in (1, 8, 32, 512)] == [64, 8, 2, 1]


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_equals_the_reference(name: str) -> None:
    case = PREFILL[name]
    close(*run(case, list(range(len(case.lengths))), "prefill"))


def test_prefill_leaves_other_sequences_rows_alone() -> None:
    close(*run(Paged(((40, 1), (30, 6), (20, 1)), heads=2, kv_heads=1), [1], "prefill"))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["paged_decode_attention", "prefill_attention"])
def test_every_parameter_value_is_right(op: str) -> None:
    loaded = registry.load(op, "triton")
    case = Paged(((300, 1),)) if op == "paged_decode_attention" else Paged(((300, 150),), heads=2, kv_heads=1)
    for parameter in loaded.params:
        for value in parameter.values:
            values = {parameter.name: value, **({"WARPS": 8} if value == 128 and parameter.name == "BLOCK_M" else {})}
            close(*run(case, [0], "decode" if op == "paged_decode_attention" else "prefill", values))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_long_contexts_at_every_block_size(dim: int, block_size: int) -> None:
    case = Paged(((4097, 1), (33, 1)), dim=dim, block_size=block_size, dtype=torch.bfloat16)
    close(*run(case, [0, 1], "decode"))
    close(*run(Paged(((2049, 70),), dim=dim, block_size=block_size), [0], "prefill"))
