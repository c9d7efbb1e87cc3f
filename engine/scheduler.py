"""Which sequences run in the next step, and how much of each: continuous batching with chunked prefill. Torch-free.

First come, first served: a sequence is admitted with blocks for all its known tokens, and when decoding runs out of
blocks the latest arrivals give theirs up and are computed again later. So the earliest arrival always proceeds.
Drafts take what known tokens leave of a step and of the free blocks, for that step alone: they delay and displace nobody
(a free block that is cached may be evicted a few tokens sooner).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.batching import SeqStep
from engine.kv_cache import BlockManager, OutOfBlocks
from engine.sequence import Sequence
from engine.speculate import Drafter, PromptLookup

LEAST = {"max_batch_tokens": 1, "max_seqs": 1, "prefill_chunk": 1, "draft_tokens": 0, "draft_ngram": 1}
POLICIES = ("mixed", "prefill_first", "decode_first")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Knobs a candidate's settings may turn. Raises ValueError for one out of range."""

    max_batch_tokens: int = 512
    max_seqs: int = 16
    prefill_chunk: int = 512
    # mixed: decodes and prefill chunks share a step. The others keep them apart: prefill_first decodes once nothing is
    # left to prefill, decode_first takes turns while there is both
    policy: str = "mixed"
    draft_tokens: int = 0  # guesses that a decoding sequence adds to a step at most; 0 is off
    draft_ngram: int = 3  # tokens of its end that must have been said before, the longest looked for

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r} is not one of {', '.join(POLICIES)}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> SchedulerConfig:
        return cls(**{name: settings[name] for name in cls.__slots__ if name in settings})


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens start..stop of one sequence in one step, and guesses of those that follow."""

    sequence: Sequence
    start: int
    stop: int
    drafts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.stop - self.start + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether this step reaches the sequence's last known token, so that the next one is drawn."""
        return self.stop == self.sequence.length

    def step(self, block_size: int) -> SeqStep:
        s = self.sequence
        table = s.allocation.blocks[: -(-(self.stop + len(self.drafts)) // block_size)]
        tokens = [*s.tokens(self.start, self.stop), *self.drafts]
        return SeqStep(s.id, tokens, self.start, table, self.samples, all_logits=bool(self.drafts))


class Scheduler:
    """Waiting and running sequences of one lane, in order of arrival.

    Paired verbs: `add`/`remove`, `schedule`/`finished`.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, limit: int = 0) -> None:
        """No sequence grows past `limit` tokens; 0 stands for what the pool holds."""
        self.config, self.blocks = config, blocks
        self.limit = limit or blocks.total * blocks.block_size
        self.draft: Drafter = PromptLookup(config.draft_ngram)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0
        self._decoded_last = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, of which nothing is computed. It must fit into the pool by itself."""
        self._arrivals += 1
        sequence.arrival, sequence.computed = self._arrivals, 0
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted sequence out and gives its blocks back."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.blocks.release(sequence.allocation)

    def schedule(self) -> list[Scheduled]:
        """The next step. Every sequence in it has blocks for its new tokens; empty only when there is no work."""
        self._admit()
        plan: list[Scheduled] = []
        policy = self.config.policy
        first, second = self._add_decodes, self._add_prefills
        if policy == "prefill_first" or (policy == "decode_first" and self._decoded_last):
            first, second = second, first
        first(plan)
        if policy == "mixed" or not plan:
            second(plan)
        self._decoded_last = bool(plan) and plan[0].start + 1 == plan[0].stop
        if self.config.draft_tokens:
            self._add_drafts(plan)
        return plan

    def finished(self, plan: list[Scheduled]) -> None:
        """The step has run and its tokens are appended: what it wrote of them may be found by others.

        What drafts that were wrong wrote is not context, and blocks taken for drafts go back.
        """
        for p in plan:
            sequence = p.sequence
            sequence.computed = min(p.stop + len(p.drafts), sequence.length - 1)  # the last token ran in no step yet
            self.blocks.publish(sequence.allocation, sequence.tokens, sequence.computed)
            if p.drafts:
                self.blocks.trim(sequence.allocation, sequence.computed)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_seqs:
            sequence = self.waiting[0]
            allocation = self.blocks.match(sequence.tokens(0, sequence.length))
            cached = len(allocation.blocks) * self.blocks.block_size
            missing = -(-sequence.length // self.blocks.block_size) - len(allocation.blocks)
            # a block to spare for each running sequence, so that admitting does not at once pre-empt
            if self.running and missing + len(self.running) > self.blocks.available:
                self.blocks.release(allocation)
                return
            self.blocks.extend(allocation, sequence.length)
            self.waiting.popleft()
            sequence.allocation, sequence.computed = allocation, cached
            if not sequence.admitted:
                sequence.cached_tokens, sequence.admitted = cached, True
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.arrival)

    def _add_decodes(self, plan: list[Scheduled]) -> None:
        budget = self._budget(plan)
        for sequence in [s for s in self.running if s.length - s.computed == 1]:
            if budget == 0:
                return
            if sequence in self.running and self._make_room(sequence, plan):
                plan.append(Scheduled(sequence, sequence.computed, sequence.length))
                budget -= 1

    def _add_prefills(self, plan: list[Scheduled]) -> None:
        budget = self._budget(plan)
        for sequence in [s for s in self.running if s.length - s.computed > 1]:
            count = min(sequence.length - sequence.computed, budget, self.config.prefill_chunk)
            if count == 0:
                return
            plan.append(Scheduled(sequence, sequence.computed, sequence.computed + count))
            budget -= count

    def _add_drafts(self, plan: list[Scheduled]) -> None:
        """Guesses for sequences that decode, in order of the plan."""
        budget = self._budget(plan)
        for i, p in enumerate(plan):
            most = min(self.config.draft_tokens, budget, self._room(p.sequence))
            if most > 0 and p.samples and p.size == 1:
                drafts = tuple(self.draft(p.sequence, most))
                self.blocks.extend(p.sequence.allocation, p.stop + len(drafts))
                plan[i] = replace(p, drafts=drafts)
                budget -= len(drafts)

    def _room(self, sequence: Sequence) -> int:
        """Drafts that the sequence can use: before its own end, the context's and the free blocks'."""
        held = len(sequence.allocation.blocks) + self.blocks.available
        answer = sequence.request.max_tokens - len(sequence.output) - 1
        return min(answer, self.limit - sequence.length - 1, held * self.blocks.block_size - sequence.length)

    def _budget(self, plan: list[Scheduled]) -> int:
        return self.config.max_batch_tokens - sum(p.size for p in plan)

    def _make_room(self, sequence: Sequence, plan: list[Scheduled]) -> bool:
        """Blocks up to the sequence's next token, pre-empting later arrivals. False when it gave way itself."""
        planned = {p.sequence.id for p in plan}
        while True:
            try:
                self.blocks.extend(sequence.allocation, sequence.length)
                return True
            except OutOfBlocks:
                last = max((s for s in self.running if s.id not in planned), key=lambda s: s.arrival)
                self._preempt(last)
                if last is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back into the queue, in order of arrival; its tokens are computed again later."""
        self.running.remove(sequence)
        self.blocks.release(sequence.allocation)
        sequence.computed = 0
        place = next((i for i, s in enumerate(self.waiting) if s.arrival > sequence.arrival), len(self.waiting))
        self.waiting.insert(place, sequence)
        self.preemptions += 1
