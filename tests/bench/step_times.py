"""Seconds of whole forwards on the demo model: programs of three families at many shapes, through an engine host.

The host's memory is filled with numbers first (untouched pages would all be one page of zeros), tokens are new for each
repeat, and the clock is ours, around a block of steps that is long enough for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.artifacts import Artifact
from engine.batching import SeqStep
from engine.client import HostClient
from engine.models.config import ModelConfig, read_config
from engine.models.resolve import resolve_model
from engine.wire import Prepare, TimedBlock
from kernels.ceilings import cached_ceilings
from kernels.hardware import detect
from optimizer.measure.rig import Rig
from optimizer.measure.tiers import Content
from tests.bench.ours import artifact

FAMILIES = {  # program -> what kind it is
    "baseline": "plain PyTorch",
    "fused_qkv + fused_gate_up": "plain PyTorch",
    "paged_attention + small_linear": "C++ operators",
    "whole_step": "C++ step",
    "whole_step (PM_SPAN=64)": "C++ step",
}
DECODE = [(b, c) for b in (1, 2, 3, 4, 6, 8, 12, 16, 24) for c in (16, 128, 512, 1024, 2048) if b * c <= 8192]
PREFILL = [(n, past) for n in (16, 32, 64, 128, 256, 512) for past in (0, 256, 1024) if n * (n / 2 + past) <= 300_000]
MIXED = [(b, n, c) for b in (2, 8) for n in (64, 192) for c in (128, 768)]
DTYPE = "bfloat16"
PASSES, BLOCK_S, MOST_RUNS = 4, 0.025, 12
POOL_BYTES = 512 << 20
PADDED = 8192 + 24 * 64 + 1024 + 512  # tokens of the largest shape, with partly filled blocks


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences that decode at a context, and one prompt's chunk behind `past` tokens."""

    batch: int = 0
    context: int = 0
    prefill: int = 0
    past: int = 0

    @property
    def kv_tokens(self) -> int:
        """Positions read, once for each query."""
        return self.batch * (self.context + 1) + self.prefill * self.past + self.prefill * (self.prefill + 1) // 2


def shapes() -> list[Shape]:
    decode = [Shape(b, c) for b, c in DECODE]
    prefill = [Shape(prefill=n, past=p) for n, p in PREFILL]
    return decode + prefill + [Shape(b, c, n, 0) for b, n, c in MIXED]


def step_of(shape: Shape, content: Content, block_size: int) -> list[SeqStep]:
    lengths = [(1, shape.context)] * shape.batch + ([(shape.prefill, shape.past)] if shape.prefill else [])
    taken, rows = 0, []
    for i, (new, start) in enumerate(lengths):
        need = -(-(start + new) // block_size)
        rows.append(SeqStep(i + 1, content.tokens(new), start, list(range(taken, taken + need))))
        taken += need
    return rows


def timed(rig: Rig, shape: Shape, content: Content, runs: int) -> float:
    """Seconds of one step, from a block of `runs` equal ones with tokens that were never used before."""
    rig.host.call(Prepare("shape", [rig.batch(step_of(shape, content, rig.block_size))]))
    start = time.perf_counter()
    rig.host.call(TimedBlock(rig.artifact.hash, "shape", repeats=runs), 60)
    return (time.perf_counter() - start) / runs


def measured(host: HostClient, program: Artifact, vocab: int, seed: int) -> dict[Shape, float]:
    """Seconds of each shape: the second least of passes over all shapes, for neighbours on the machine only ever add."""
    rig = Rig(host, program, kv_bytes=POOL_BYTES)
    rig.fill(list(range(min(rig.loaded.blocks, PADDED // rig.block_size))), 0.02)
    content = Content(vocab, seed)
    found = {shape: [timed(rig, shape, content, 1)] for shape in shapes()}
    runs = {shape: max(1, min(MOST_RUNS, round(BLOCK_S / first[0]))) for shape, first in found.items()}
    found = {shape: [] for shape in found}
    for _ in range(PASSES):
        for shape, taken in found.items():
            taken.append(timed(rig, shape, content, runs[shape]))
    rig.unload()
    return {shape: sorted(taken)[1] for shape, taken in found.items()}


def run(data: Path) -> tuple[ModelConfig, dict[str, Any], list[tuple[str, str, Shape, float]]]:
    """(the model, the ceilings of the same minutes, (program, family, shape, seconds) of every program at every shape)."""
    model, threads = resolve_model("demo", data), detect().cores
    config = read_config(model)
    built = {name: artifact(name, data) for name in FAMILIES}
    ceilings = cached_ceilings(data, threads)
    with HostClient(model, dtype=DTYPE, threads=threads) as host:
        return (
            config,
            ceilings,
            [
                (name, FAMILIES[name], shape, taken)
                for seed, (name, program) in enumerate(built.items())
                for shape, taken in measured(host, program, config.vocab_size, seed).items()
            ],
        )
