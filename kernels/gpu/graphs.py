"""CUDA graphs of pure decode steps: one for each padded batch size, captured when it is first needed, replayed afterwards.

A padding row has context 0 and slot -1: it reads no block of the cache and writes none, whoever owns them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.launch import counting
from kernels.gpu.step import Model, StepInput, run_step

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PADDING = {"token_ids": 0, "positions": 0, "slots": -1, "contexts": 0, "table": 0}


def padded_size(rows: int) -> int | None:
    """The smallest captured size that holds `rows`, or None when they are too many for a graph."""
    return next((size for size in SIZES if size >= rows), None)


def static_input(size: int, width: int, device: torch.device) -> StepInput:
    """A decode step of `size` rows, all padding, whose tensors stay where they are. Block tables hold `width` blocks."""
    rows, sequences = torch.arange(size, device=device), torch.arange(size + 1, dtype=torch.int32, device=device)
    return StepInput(
        token_ids=torch.zeros_like(rows),
        positions=torch.zeros_like(rows),
        slots=torch.full_like(rows, PADDING["slots"]),
        query_start=sequences,
        contexts=torch.zeros(size, dtype=torch.int32, device=device),
        table=torch.zeros((size, width), dtype=torch.int32, device=device),
        decode=sequences[:size],
        prefill=sequences[:0],
        longest=0,
        logit_rows=rows,
    )


def fill_static(static: StepInput, step: StepInput) -> None:
    """Puts a pure decode step into the first rows of `static` and padding into the rest. Raises ValueError for too wide a table."""
    rows, width = step.token_ids.shape[0], step.table.shape[1]
    if width > static.table.shape[1]:
        raise ValueError(f"a block table of {width} blocks does not fit into a graph's {static.table.shape[1]}")
    for name, padding in PADDING.items():
        target, source = getattr(static, name), getattr(step, name)
        if name == "table":
            target[:rows, :width].copy_(source)
        else:
            target[:rows].copy_(source)
            target[rows:].fill_(padding)


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    static: StepInput
    logits: Tensor
    greedy: Tensor
    launches: Counter[str]


class DecodeGraphs:
    """Graphs of one model. They hold the addresses of the cache they were captured with, so each cache has its own."""

    def __init__(self, model: Model, width: int, device: torch.device) -> None:
        self.model, self.width, self.device = model, width, device
        self.captured: dict[tuple[int, int], Captured] = {}
        self.memory = torch.cuda.graph_pool_handle()

    def run(self, step: StepInput, cache: Sequence[Tensor], dispatch: Counter[str]) -> tuple[Tensor, Tensor] | None:
        """Logits and greedy tokens of a pure decode step, copies that the next step leaves alone; None when no graph is large enough."""
        size = padded_size(step.token_ids.shape[0])
        if size is None or step.table.shape[1] > self.width:
            return None
        found = self.captured.get((size, cache[0].data_ptr())) or self.capture(size, cache)
        fill_static(found.static, step)
        found.graph.replay()
        dispatch.update(found.launches)
        rows = step.token_ids.shape[0]
        return found.logits[:rows][step.logit_rows], found.greedy[:rows][step.logit_rows]

    def capture(self, size: int, cache: Sequence[Tensor]) -> Captured:
        """Warms up on a stream of its own (kernels compile), then captures; both on padding only, so the cache is not touched."""
        static, launches = static_input(size, self.width, self.device), Counter()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run_step(self.model, static, cache)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with counting(launches), torch.cuda.graph(graph, pool=self.memory):
            logits, greedy = run_step(self.model, static, cache)
        made = self.captured[size, cache[0].data_ptr()] = Captured(graph, static, logits, greedy, launches)
        return made
