"""Which sequences run in the next step, and how much of each: continuous batching with chunked prefill. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.batching import SeqStep
from engine.kv_cache import BlockManager, OutOfBlocks
from engine.sequence import Sequence

POLICIES = ("mixed", "prefill_first", "decode_first")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Knobs a candidate's settings may turn. Raises ValueError for one out of range."""

    max_batch_tokens: int = 512
    max_seqs: int = 16
    prefill_chunk: int = 512
    policy: str = "mixed"  # mixed: decodes and prefill chunks share a step; the others keep them apart

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r} is not one of {', '.join(POLICIES)}")
        for name in ("max_batch_tokens", "max_seqs", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> SchedulerConfig:
        return cls(**{name: settings[name] for name in cls.__slots__ if name in settings})


@dataclass(frozen=True, slots=True)
class Scheduled:
    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the sequence's last known token, so that the next one is drawn."""
        return self.stop == self.sequence.length

    def step(self) -> SeqStep:
        s = self.sequence
        return SeqStep(s.id, s.tokens(self.start, self.stop), self.start, s.allocation.blocks, self.samples)


class Scheduler:
    """Waiting and running sequences of one lane. The newest running sequence gives way when blocks run out."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Scheduled]:
        """The next step, decodes before prefills; every sequence in it has blocks for its new tokens."""
        self._admit()
        prefilling = [s for s in self.running if s.length - s.computed > 1]
        budget = self.config.max_batch_tokens
        plan: list[Scheduled] = []
        if not (self.config.policy == "prefill_first" and prefilling):
            budget = self._add_decodes(plan, budget)
        if not (self.config.policy == "decode_first" and plan):
            self._add_prefills(plan, budget)
        return plan

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted sequence out and gives its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.release(sequence.allocation)

    def preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back to the head of the queue; its prompt and output are computed again later."""
        self.running.remove(sequence)
        self.blocks.release(sequence.allocation)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_seqs:
            sequence = self.waiting[0]
            known = sequence.tokens(0, sequence.length)
            allocation = self.blocks.match(known)
            cached = len(allocation.blocks) * self.blocks.block_size
            first = min(sequence.length, cached + self.config.prefill_chunk)
            # one spare block a running sequence, so that admitting does not at once pre-empt
            spare = len(self.running) if self.running else 0
            wanted = -(-first // self.blocks.block_size) - len(allocation.blocks)
            if wanted + spare > self.blocks.available and self.running:
                self.blocks.release(allocation)
                return
            self.waiting.popleft()
            sequence.allocation, sequence.computed = allocation, cached
            if not sequence.admitted:
                sequence.cached_tokens, sequence.admitted = cached, True
            self.running.append(sequence)

    def _add_decodes(self, plan: list[Scheduled], budget: int) -> int:
        for sequence in [s for s in self.running if s.length - s.computed == 1]:
            if budget and sequence in self.running and self._make_room(sequence, sequence.length, plan):
                plan.append(Scheduled(sequence, sequence.computed, sequence.length))
                budget -= 1
        return budget

    def _add_prefills(self, plan: list[Scheduled], budget: int) -> None:
        for sequence in [s for s in self.running if s.length - s.computed > 1]:
            count = min(sequence.length - sequence.computed, budget, self.config.prefill_chunk)
            if count <= 0 or sequence not in self.running:
                continue
            if self._make_room(sequence, sequence.computed + count, plan):
                plan.append(Scheduled(sequence, sequence.computed, sequence.computed + count))
                budget -= count

    def _make_room(self, sequence: Sequence, tokens: int, plan: list[Scheduled]) -> bool:
        """Extends the sequence's blocks, pre-empting newer ones that are not in this step yet. False when it must wait."""
        planned = {p.sequence.id for p in plan}
        while True:
            try:
                self.blocks.extend(sequence.allocation, tokens)
                return True
            except OutOfBlocks:
                victims = [s for s in self.running if s.id not in planned and s is not sequence]
                if victims:
                    self.preempt(victims[-1])
                    continue
                if not planned:
                    raise
                self.preempt(sequence)
                return False
