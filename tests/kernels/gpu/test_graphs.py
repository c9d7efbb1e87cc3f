"""What a captured decode step is fed and gives back. Capture and replay themselves need a GPU: here a replay runs the step again."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu.check_speed import Checkpoint
from kernels.gpu.check_values import Shapes
from kernels.gpu.graphs import DecodeGraphs, fill_static, padded_size, static_input
from kernels.gpu.step import Model, StepInput, run_step

SHAPES = Shapes(64, 64, 1, 2, 1, 64, 100, 40, (1,), 2)
CPU = torch.device("cpu")
FEW_SPLITS = {"paged_decode_attention": {"SPLITS": 2}}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(SHAPES, CPU)


@pytest.fixture
def model(checkpoint: Checkpoint) -> Model:
    return checkpoint.model(params=FEW_SPLITS)


def decode_step(checkpoint: Checkpoint, rows: int, seed: int) -> tuple[list[Tensor], StepInput]:
    """Random tokens, sequences of different lengths, random cache."""
    torch.manual_seed(seed)
    cache, step = checkpoint.cache(rows)
    contexts = torch.randint(1, SHAPES.context + 1, (rows,), dtype=torch.int32)
    at = contexts.long() - 1
    slots = step.table.gather(1, (at // 16)[:, None])[:, 0].long() * 16 + at % 16
    tokens = torch.randint(0, SHAPES.vocab, (rows,))
    return cache, replace(step, token_ids=tokens, positions=at, slots=slots, contexts=contexts)


def test_padding_gives_the_same_rows_and_touches_no_other_block(checkpoint: Checkpoint, model: Model) -> None:
    cache, step = decode_step(checkpoint, 2, 1)
    padded_cache = [t.clone() for t in cache]
    static = static_input(4, 5, CPU)
    for left_behind in (static.slots, static.contexts, static.positions):  # by a larger batch before this one
        left_behind.fill_(3)
    fill_static(static, step)
    want, _ = run_step(model, step, cache)
    got, _ = run_step(model, static, padded_cache)
    torch.testing.assert_close(got[:2], want)
    for a, b in zip(cache, padded_cache, strict=True):
        assert torch.equal(a, b)


def test_padding_alone_writes_nothing(checkpoint: Checkpoint, model: Model) -> None:
    """Warming up and capturing run on padding while sequences live in the cache."""
    cache, _ = decode_step(checkpoint, 2, 2)
    before = [t.clone() for t in cache]
    logits, _ = run_step(model, static_input(4, 3, CPU), cache)
    assert bool(torch.isfinite(logits).all())
    assert all(torch.equal(a, b) for a, b in zip(before, cache, strict=True))


def test_a_table_too_wide_is_refused(checkpoint: Checkpoint) -> None:
    _, step = decode_step(checkpoint, 2, 3)
    with pytest.raises(ValueError, match="3 blocks does not fit into a graph's 2"):
        fill_static(static_input(4, 2, CPU), step)


def test_batches_are_padded_to_the_next_captured_size() -> None:
    assert [padded_size(n) for n in (1, 3, 17, 256, 257)] == [1, 4, 24, 256, None]


@pytest.fixture
def graphs(model: Model, monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Graphs whose replay runs the captured step once more into the captured outputs."""

    class Again:
        def replay(self) -> None:
            key, captured = next((k, c) for k, c in made.captured.items() if c.graph is self)
            logits, greedy = run_step(model, captured.static, caches[key[1]])
            captured.logits.copy_(logits)
            captured.greedy.copy_(greedy)

    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes: dict[str, Any] = {
        "graph_pool_handle": lambda: None, "Stream": lambda _: stream, "current_stream": lambda _: stream,
        "stream": lambda _: nullcontext(), "graph": lambda _graph, pool: nullcontext(), "CUDAGraph": Again,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    made, caches = DecodeGraphs(model, 3, CPU), {}
    monkeypatch.setattr(made, "caches", caches, raising=False)
    return made


def test_each_size_is_captured_once_and_replays_count_as_launches(
    checkpoint: Checkpoint, model: Model, graphs: Any
) -> None:
    cache, _ = decode_step(checkpoint, 4, 4)
    graphs.caches[cache[0].data_ptr()] = cache
    dispatch: Counter[str] = Counter()
    for rows, seed in ((3, 5), (2, 6), (4, 7)):
        _, step = decode_step(checkpoint, rows, seed)
        want, greedy = run_step(model, step, [t.clone() for t in cache])
        got = graphs.run(step, cache, dispatch)
        torch.testing.assert_close(got[0], want)
        assert torch.equal(got[1], greedy)
    assert {size for size, _ in graphs.captured} == {2, 4}
    assert dispatch["paged_decode_attention"] == 3 and dispatch["rmsnorm_residual"] == 9


def test_what_fits_no_graph_is_left_to_plain_launches(checkpoint: Checkpoint, graphs: DecodeGraphs) -> None:
    cache, step = decode_step(checkpoint, 1, 8)
    wide = replace(step, table=torch.zeros((1, 4), dtype=torch.int32))
    many = replace(step, token_ids=torch.zeros(300, dtype=torch.int64))
    assert graphs.run(wide, cache, Counter()) is None and graphs.run(many, cache, Counter()) is None
