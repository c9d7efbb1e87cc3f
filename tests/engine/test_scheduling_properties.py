"""Whatever arrives, ends, is aborted or runs out of blocks, in any order: the books balance and nobody waits long."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kv_cache import BlockManager
from engine.scheduler import POLICIES, Scheduled, Scheduler, SchedulerConfig
from engine.sequence import GenerationRequest, Sequence
from engine.speculate import accepted

SIZE = 4


class Serving(RuleBasedStateMachine):
    """A model of the pool beside the real one: `content[block][offset]` is the whole prefix that wrote the slot."""

    @initialize(
        blocks=st.integers(2, 12),
        max_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        chunk=st.integers(1, 20),
        policy=st.sampled_from(POLICIES),
        drafts=st.sampled_from([0, 0, 1, 3, 9]),
    )
    def start(self, blocks: int, max_seqs: int, budget: int, chunk: int, policy: str, drafts: int) -> None:
        self.blocks = BlockManager(blocks, SIZE, "writer")
        config = SchedulerConfig(budget, max_seqs, chunk, policy, drafts)
        self.scheduler = Scheduler(config, self.blocks)
        self.scheduler.draft = self.guess
        self.guesses = random.Random(0)
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.alive: list[Sequence] = []
        self.number = 0

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """Right (7 is what is always said) or wrong, and as many as it likes."""
        return self.guesses.choices([7, 7, 8], k=self.guesses.randint(0, most))

    @rule(data=st.data(), share=st.booleans())
    def arrive(self, data: st.DataObject, share: bool) -> None:
        longest = self.blocks.total * SIZE
        length = data.draw(st.integers(1, longest - 1))
        self.number += 1
        base = 0 if share else 100 * self.number
        request = GenerationRequest(self.number, [base + i for i in range(length)], data.draw(st.integers(1, 12)))
        sequence = Sequence(request)
        self.alive.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)

    @rule(steps=st.integers(1, 4), lost=st.booleans())
    def run(self, steps: int, lost: bool) -> None:
        for _ in range(steps):
            self.step(lost)

    def step(self, lost: bool = False) -> int:
        """One step. With `lost` it never finishes: its sequences end and nothing it wrote may be found again."""
        plan = self.scheduler.schedule()
        assert bool(plan) == bool(self.alive), "a step is empty only when there is no work"
        assert sum(p.size for p in plan) <= self.scheduler.config.max_batch_tokens
        assert len({p.sequence.id for p in plan}) == len(plan) <= self.scheduler.config.max_seqs
        owners: set[tuple[int, int]] = set()
        for p in plan:
            tokens = [*p.sequence.tokens(0, p.stop), *p.drafts]
            table = p.step(SIZE).block_table
            for position in range(p.start):  # what it will read was written for exactly this prefix
                slot = table[position // SIZE], position % SIZE
                assert self.content[slot] == tuple(tokens[: position + 1])
            for position in range(p.start, p.stop + len(p.drafts)):
                slot = table[position // SIZE], position % SIZE
                assert slot not in owners and self.blocks._references[slot[0]] == 1, "a slot is written by one owner"
                assert slot[0] not in self.blocks._name_of, "a published block is never written"
                owners.add(slot)
                self.content[slot] = tuple(tokens[: position + 1])
        sampled = [p for p in plan if p.samples]
        if lost:
            for p in plan:
                self.alive.remove(p.sequence)
                self.scheduler.remove(p.sequence)
            for slot in owners:
                self.content[slot] = (-1,)
            return 0
        ended = [p.sequence for p in sampled if self.say(p)]
        self.scheduler.finished(plan)
        for p in plan:
            held, length = len(p.sequence.allocation.blocks), p.sequence.length
            assert held <= -(-length // SIZE), "a block taken for drafts is kept"
        for sequence in ended:
            self.alive.remove(sequence)
            self.scheduler.remove(sequence)
        return len(sampled)

    def say(self, p: Scheduled) -> bool:
        """A 7 for every draft that was one, and one more. Whether that ends the sequence."""
        for _ in range(1 + accepted(p.drafts, [7] * len(p.drafts))):
            p.sequence.output.append(7)
            if p.sequence.finish_reason(7, self.blocks.total * SIZE):
                return True
        return False

    @invariant()
    def the_books_balance(self) -> None:
        self.blocks.check([s.allocation for s in self.alive])
        assert {s.id for s in self.alive} == {s.id for s in [*self.scheduler.running, *self.scheduler.waiting]}
        for block in self.blocks._name_of:
            assert all((block, i) in self.content for i in range(SIZE)), "published before it was written"

    def teardown(self) -> None:
        """Left alone, everything ends within a bounded number of steps and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.alive:
                break
            self.step()
        assert not self.alive, "somebody waits for ever"
        self.blocks.check([])
        assert self.blocks.available == self.blocks.total


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)


class PublishesTooEarly(Serving):
    """A planted fault: blocks are named when their step is planned."""

    def step(self, lost: bool = False) -> int:
        for sequence in self.scheduler.running:
            held = len(sequence.allocation.blocks) * SIZE
            self.blocks.publish(sequence.allocation, sequence.tokens, min(held, sequence.length))
        return super().step(lost)


class SharesABlock(Serving):
    """A planted fault: a preempted or finished sequence's block is handed out while another still reads it."""

    def step(self, lost: bool = False) -> int:
        for block, count in enumerate(self.blocks._references):
            if count > 1:
                self.blocks._references[block] = 1
        return super().step(lost)


class PublishesDrafts(Serving):
    """A planted fault: blocks are named with the drafts in them, before it is known that they hold."""

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        drafts = super().guess(sequence, most)
        said = [*sequence.tokens(0, sequence.length), *drafts]
        self.blocks.extend(sequence.allocation, len(said))
        self.blocks.publish(sequence.allocation, lambda start, stop: said[start:stop], len(said))
        return drafts


class CountsRejected(Serving):
    """A planted fault: the slot of a rejected draft is taken for that of the token said in its place."""

    def say(self, p: Scheduled) -> bool:
        ended = super().say(p)
        if p.drafts and not ended:
            p.sequence.output.append(7)
        return ended


class KeepsBlocks(Serving):
    """A planted fault: blocks taken for drafts stay with the sequence."""

    def step(self, lost: bool = False) -> int:
        self.blocks.trim = lambda allocation, tokens: None  # type: ignore[method-assign]
        return super().step(lost)


@pytest.mark.parametrize(
    "fault", [PublishesTooEarly, SharesABlock, PublishesDrafts, CountsRejected, KeepsBlocks], ids=lambda f: f.__name__
)
def test_a_planted_fault_is_caught(fault: type[Serving]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            fault,
            settings=settings(
                TestServing.settings, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False
            ),
        )
