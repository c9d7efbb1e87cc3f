"""The scheduler: who runs in a step, in which order, and who gives way when blocks run out."""

from __future__ import annotations

import pytest

from engine.kv_cache import BlockManager
from engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from engine.sequence import GenerationRequest, Sequence

SIZE = 4


def make(blocks: int = 64, **knobs: object) -> Scheduler:
    return Scheduler(SchedulerConfig(**knobs), BlockManager(blocks, SIZE, "writer"))  # type: ignore[arg-type]


def add(scheduler: Scheduler, number: int, prompt: int, base: int | None = None) -> Sequence:
    first = 1000 * number if base is None else base
    sequence = Sequence(GenerationRequest(number, list(range(first, first + prompt)), max_tokens=1000))
    scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """One step; every sampled sequence gets token 7. Returns (request, start, stop) of what ran."""
    plan = scheduler.schedule()
    sampled = [p.sequence for p in plan if p.samples]
    shown = [(p.sequence.id, p.start, p.stop) for p in plan]
    for sequence in sampled:
        sequence.output.append(7)
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


@pytest.mark.parametrize(
    ("knobs", "named"),
    [({"policy": "fastest"}, "policy"), ({"max_seqs": 0}, "max_seqs"), ({"prefill_chunk": "many"}, "prefill_chunk")],
)
def test_a_knob_out_of_range_is_named(knobs: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SchedulerConfig(**knobs)  # type: ignore[arg-type]


def test_settings_may_hold_other_knobs_too() -> None:
    config = SchedulerConfig.from_settings({"max_seqs": 3, "block_size": 16})
    assert config.max_seqs == 3 and config.policy == "mixed"
