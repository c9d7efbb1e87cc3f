"""The scheduler: who runs in a step, in which order, and who gives way when blocks run out."""

from __future__ import annotations

import pytest

from engine.kv_cache import BlockManager
from engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from engine.sequence import GenerationRequest, Sequence
from engine.speculate import accepted

SIZE = 4


def make(blocks: int = 64, **knobs: object) -> Scheduler:
    return Scheduler(SchedulerConfig(**knobs), BlockManager(blocks, SIZE, "writer"))  # type: ignore[arg-type]


def make_drafting(drafts: list[int], blocks: int = 64, limit: int = 0, **knobs: object) -> Scheduler:
    """Every decoding sequence is given the same drafts. `run` says 7 always, so 7s are right."""
    knobs = {"draft_tokens": len(drafts), **knobs}
    config = SchedulerConfig(**knobs)  # type: ignore[arg-type]
    scheduler = Scheduler(config, BlockManager(blocks, SIZE, "writer"), limit)
    scheduler.draft = lambda sequence, most: drafts[:most]
    return scheduler


def add(scheduler: Scheduler, number: int, prompt: int, base: int | None = None) -> Sequence:
    first = 1000 * number if base is None else base
    sequence = Sequence(GenerationRequest(number, list(range(first, first + prompt)), max_tokens=1000))
    scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """One step; every sampled sequence gets token 7. Returns (request, start, stop) of what ran."""
    plan = scheduler.schedule()
    sampled = [p for p in plan if p.samples]
    shown = [(p.sequence.id, p.start, p.stop) for p in plan]
    for p in sampled:
        p.sequence.output += [7] * (1 + accepted(p.drafts, [7] * len(p.drafts)))
    scheduler.finished(plan)
    return shown


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    scheduler = make(max_batch_tokens=8, prefill_chunk=8)
    add(scheduler, 1, 3)
    assert run(scheduler) == [(1, 0, 3)]
    add(scheduler, 2, 18)
    assert run(scheduler) == [(1, 3, 4), (2, 0, 7)]
    assert run(scheduler) == [(1, 4, 5), (2, 7, 14)]
    assert run(scheduler) == [(1, 5, 6), (2, 14, 18)]
    assert run(scheduler) == [(1, 6, 7), (2, 18, 19)]


def test_prefill_first_holds_decodes_until_every_prompt_is_computed() -> None:
    scheduler = make(max_batch_tokens=8, policy="prefill_first")
    add(scheduler, 1, 3)
    run(scheduler)
    add(scheduler, 2, 12)
    assert [run(scheduler) for _ in range(3)] == [[(2, 0, 8)], [(2, 8, 12)], [(1, 3, 4), (2, 12, 13)]]


def test_decode_first_takes_turns() -> None:
    scheduler = make(max_batch_tokens=8, policy="decode_first")
    add(scheduler, 1, 3)
    run(scheduler)
    add(scheduler, 2, 12)
    steps = [run(scheduler) for _ in range(4)]
    assert steps == [[(1, 3, 4)], [(2, 0, 8)], [(1, 4, 5)], [(2, 8, 12)]]


def test_no_more_than_max_seqs_run_at_once() -> None:
    scheduler = make(max_seqs=2)
    for number in range(3):
        add(scheduler, number, 2)
    assert [r[0] for r in run(scheduler)] == [0, 1]
    scheduler.remove(scheduler.running[0])
    assert [r[0] for r in run(scheduler)] == [1, 2]


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make()
    add(scheduler, 1, 10, base=0)
    run(scheduler)
    second = add(scheduler, 2, 12, base=0)
    assert run(scheduler)[-1] == (2, 8, 12)
    assert second.cached_tokens == 8


def test_the_latest_arrival_gives_way_and_is_computed_again() -> None:
    scheduler = make(blocks=5)
    first, second = add(scheduler, 1, 7), add(scheduler, 2, 7)
    while not scheduler.preemptions:
        run(scheduler)
    assert list(scheduler.waiting) == [second] and scheduler.running == [first]
    assert second.allocation.blocks == [] and second.computed == 0 and second.output
    scheduler.remove(first)
    run(scheduler)
    assert scheduler.running == [second] and second.computed == second.length - 1
    scheduler.blocks.check([second.allocation])


def test_the_earliest_arrival_is_never_pre_empted() -> None:
    scheduler = make(blocks=6, max_batch_tokens=64)
    first, second, third = (add(scheduler, n, 7) for n in (1, 2, 3))
    for _ in range(15):
        run(scheduler)
    assert first in scheduler.running and len(first.output) == 15
    assert second in scheduler.waiting or third in scheduler.waiting


def test_admission_leaves_running_sequences_room_to_grow() -> None:
    scheduler = make(blocks=4)
    add(scheduler, 1, 7)
    run(scheduler)
    late = add(scheduler, 2, 8)  # two blocks would fit, with none to spare for the other
    run(scheduler)
    assert list(scheduler.waiting) == [late]


def test_the_block_table_of_a_step_covers_its_own_tokens_only() -> None:
    scheduler = make(max_batch_tokens=4)
    sequence = add(scheduler, 1, 10)
    (scheduled,) = scheduler.schedule()
    step = scheduled.step(SIZE)
    assert len(sequence.allocation.blocks) == 3 and list(step.block_table) == sequence.allocation.blocks[:1]
    assert not step.wants_logits


def test_only_the_step_that_reaches_the_last_known_token_samples() -> None:
    sequence = Sequence(GenerationRequest(1, [1, 2, 3], 5), output=[4])
    assert Scheduled(sequence, 0, 4).samples
    assert not Scheduled(sequence, 0, 3).samples


def test_a_draft_is_a_row_like_a_prompts_and_every_row_is_sampled() -> None:
    scheduler = make_drafting([7, 8, 9])
    add(scheduler, 1, 3)
    run(scheduler)
    (p,) = scheduler.schedule()
    step = p.step(SIZE)
    assert (p.start, p.stop, p.drafts, p.samples) == (3, 4, (7, 8, 9), True)
    assert step.token_ids == [7, 7, 8, 9] and step.all_logits and step.phase == 0
    assert len(step.block_table) == 2, "it covers the drafts"


def test_what_held_is_computed_and_blocks_of_what_did_not_go_back() -> None:
    scheduler = make_drafting([7, 8, 7, 7, 7])
    sequence = add(scheduler, 1, 3)
    run(scheduler)
    run(scheduler)
    assert sequence.output == [7, 7, 7] and sequence.computed == 5
    assert len(sequence.allocation.blocks) == 2 and sequence.allocation.published == 1
    scheduler.blocks.check([sequence.allocation])


def test_known_tokens_come_before_drafts() -> None:
    scheduler = make_drafting([8, 8, 8], max_batch_tokens=8)
    for number in (1, 2):
        add(scheduler, number, 3)
    run(scheduler)
    add(scheduler, 3, 4)
    plan = scheduler.schedule()
    assert [(p.sequence.id, p.stop - p.start, len(p.drafts)) for p in plan] == [(1, 1, 2), (2, 1, 0), (3, 4, 0)]


def test_wrong_drafts_change_no_step_and_pre_empt_nobody() -> None:
    def steps(scheduler: Scheduler) -> list[list[tuple[int, int, int]]]:
        for number in (1, 2, 3):
            add(scheduler, number, 7)
        return [run(scheduler) for _ in range(25)]

    plain, drafting = make(blocks=9), make_drafting([8] * 6, blocks=9)
    assert steps(drafting) == steps(plain)
    assert drafting.preemptions == plain.preemptions > 0


def test_no_more_is_drafted_than_an_answer_a_context_or_the_pool_holds() -> None:
    def first_drafts(scheduler: Scheduler, max_tokens: int = 100) -> int:
        scheduler.add(Sequence(GenerationRequest(1, [1, 2, 3], max_tokens)))
        run(scheduler)
        return len(scheduler.schedule()[0].drafts)

    assert first_drafts(make_drafting([8] * 9)) == 9
    assert first_drafts(make_drafting([8] * 9), max_tokens=4) == 2, "one is said, one is drawn after the drafts"
    assert first_drafts(make_drafting([8] * 9, limit=8)) == 3
    assert first_drafts(make_drafting([8] * 9, blocks=2)) == 3
    assert first_drafts(make_drafting([8] * 9), max_tokens=2) == 0


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"draft_ngram": 0}, "draft_ngram"),
        ({"policy": "fastest"}, "policy"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"prefill_chunk": "many"}, "prefill_chunk"),
    ],
)
def test_a_knob_out_of_range_is_named(knobs: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SchedulerConfig(**knobs)  # type: ignore[arg-type]


def test_settings_may_hold_other_knobs_too() -> None:
    config = SchedulerConfig.from_settings({"max_seqs": 3, "block_size": 16})
    assert config.max_seqs == 3 and config.policy == "mixed"
