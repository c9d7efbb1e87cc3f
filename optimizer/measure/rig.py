"""Drives one resident candidate step by step, with blocks and content of the caller's choosing. Torch-free.

A `Script` fixes every step's shape by its lengths alone; two scripts of equal lengths make equal step shapes, so what
they give for an equal sequence can be compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.artifacts import Artifact
from engine.batching import SeqStep, make_batch
from engine.client import HostClient
from engine.wire import Fill, Load, Loaded, SampleRow, Step, StepDone, Unload, WireBatch

Tokens = tuple[int, ...]
Tables = list[list[int]]


@dataclass(frozen=True, slots=True)
class Script:
    """Sequences side by side: prompts prefilled together (in chunks when `chunk` > 0), `forced` then fed one a step."""

    prompts: tuple[Tokens, ...]
    forced: tuple[Tokens, ...]
    chunk: int = 0
    every_row: bool = False  # logits of every prompt position, not of the last alone
    request_ids: Tokens = ()

    @property
    def lengths(self) -> list[int]:
        return [len(p) + len(f) for p, f in zip(self.prompts, self.forced, strict=True)]

    def steps(self, tables: Sequence[Sequence[int]]) -> list[list[SeqStep]]:
        return [*self.prefill_steps(tables), *self.decode_steps(tables)]

    def prefill_steps(self, tables: Sequence[Sequence[int]]) -> list[list[SeqStep]]:
        longest = max(map(len, self.prompts))
        chunk = self.chunk or longest
        steps = []
        for start in range(0, longest, chunk):
            step = []
            for i, prompt in enumerate(self.prompts):
                part = prompt[start : start + chunk]
                if part:
                    last = start + chunk >= len(prompt)
                    step.append(SeqStep(self._id(i), part, start, tables[i], last, self.every_row))
            steps.append(step)
        return steps

    def decode_steps(self, tables: Sequence[Sequence[int]]) -> list[list[SeqStep]]:
        return [
            [
                SeqStep(self._id(i), (forced[n],), len(self.prompts[i]) + n, tables[i])
                for i, forced in enumerate(self.forced)
                if n < len(forced)
            ]
            for n in range(max(map(len, self.forced), default=0))
        ]

    def _id(self, i: int) -> int:
        return self.request_ids[i] if self.request_ids else i + 1


@dataclass(slots=True)
class Rig:
    """A candidate loaded in a host. `blocks` > 0 asks for a pool of exactly so many."""

    host: HostClient
    artifact: Artifact
    layers: int = 0
    kv_bytes: int = 0
    blocks: int = 0
    timeout_s: float = 60.0
    resident: Loaded | None = None  # given when somebody else loaded it
    loaded: Loaded = field(init=False)

    def __post_init__(self) -> None:
        self.loaded = self.resident or self.load()

    @property
    def block_size(self) -> int:
        return self.loaded.block_size

    def load(self) -> Loaded:
        """Builds the candidate anew with a fresh pool. Raises HostFailure."""
        message = Load(self.artifact.hash, str(self.artifact.path), self.layers, self.kv_bytes)
        loaded = self.host.call(message, self.timeout_s)
        assert isinstance(loaded, Loaded)
        if self.blocks and loaded.blocks != self.blocks:
            message = Load(
                self.artifact.hash, str(self.artifact.path), self.layers, self.blocks * loaded.bytes_per_block
            )
            loaded = self.host.call(message, self.timeout_s)
            assert isinstance(loaded, Loaded)
        self.loaded = loaded
        return loaded

    def unload(self) -> None:
        self.host.call(Unload(self.artifact.hash, self.layers), self.timeout_s)

    def tables(self, script: Script, order: Sequence[int] | None = None) -> Tables:
        """Blocks for each sequence, taken one after another from `order` (0, 1, 2 ... when none is given)."""
        needs = [-(-n // self.block_size) for n in script.lengths]
        free = list(range(sum(needs))) if order is None else list(order)
        if sum(needs) > min(len(free), self.loaded.blocks):
            raise ValueError(f"{sum(needs)} blocks are needed and the pool has {self.loaded.blocks}")
        taken = 0
        tables = []
        for need in needs:
            tables.append(free[taken : taken + need])
            taken += need
        return tables

    def batch(self, step: Sequence[SeqStep]) -> WireBatch:
        return make_batch(step, self.block_size)

    def step(self, step: Sequence[SeqStep]) -> np.ndarray:
        """Float32 logits [rows asked for, vocab]."""
        message = Step(self.artifact.hash, self.batch(step), layers=self.layers, want_logits=True)
        done = self.host.call(message, self.timeout_s)
        assert isinstance(done, StepDone)
        rows = sum(len(s.token_ids) if s.all_logits else int(s.wants_logits) for s in step)
        return np.frombuffer(done.logits, np.float32).reshape(rows, -1) if rows else np.empty((0, 0), np.float32)

    def choose(self, step: Sequence[SeqStep]) -> list[int]:
        """The greedy token of each row asked for; no logits cross the pipe."""
        rows = sum(len(s.token_ids) if s.all_logits else int(s.wants_logits) for s in step)
        greedy = [SampleRow(temperature=0.0)] * rows
        done = self.host.call(Step(self.artifact.hash, self.batch(step), greedy, self.layers), self.timeout_s)
        assert isinstance(done, StepDone)
        return done.token_ids

    def fill(self, blocks: Sequence[int], value: float) -> None:
        self.host.call(
            Fill(self.artifact.hash, np.asarray(blocks, np.int32).tobytes(), value, self.layers), self.timeout_s
        )

    def play(
        self, script: Script, tables: Tables | None = None, before_step: Callable[[int], None] | None = None
    ) -> list[np.ndarray]:
        """Runs the whole script; for each sequence its logits [rows, vocab], in order of position."""
        tables = self.tables(script) if tables is None else tables
        rows: dict[int, list[np.ndarray]] = {script._id(i): [] for i in range(len(script.prompts))}
        for n, step in enumerate(script.steps(tables)):
            if before_step is not None:
                before_step(n)
            logits, at = self.step(step), 0
            for s in step:
                count = len(s.token_ids) if s.all_logits else int(s.wants_logits)
                rows[s.request_id].append(logits[at : at + count])
                at += count
        return [np.concatenate([part for part in parts if part.size]) for parts in rows.values()]
