"""The engine with drafts on a real host: the tokens it gives without them, in fewer steps.

Exact equality holds on the tiny model: in float32 its logits lie further apart than what the number of rows in a step
changes. In bfloat16 it cannot be promised (`engine.speculate`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from engine.api_metrics import Metrics
from engine.artifacts import Artifact
from engine.client import HostClient
from engine.core import Engine, Lane
from engine.scheduler import Scheduled, SchedulerConfig
from engine.sequence import GenerationRequest, SamplingParams, Sequence, TokenEvent
from engine.speculate import Drafter
from engine.wire import StepDone
from tests.engine.test_core import BLOCK, BLOCK_BYTES, GREEDY, check, finish, forced, prompt, request, run

CONFIG = SchedulerConfig(draft_tokens=4)
WARM = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.3, seed=3, ignore_eos=True, logprobs=2)


def looping(period: int, length: int) -> list[int]:
    return [3 + (i % period) * 11 for i in range(length)]


def crowd(tokens: int = 40, sampling: SamplingParams = GREEDY) -> list[GenerationRequest]:
    prompts = [prompt(i, 5 + 7 * i) for i in range(6)] + [looping(i, 9 + 5 * i) for i in range(1, 7)]
    return [request(i, p, tokens - i, sampling) for i, p in enumerate(prompts)]


def drafting(engine: Engine, drafter: Drafter) -> Engine:
    engine.lanes[0].scheduler.draft = drafter
    return engine


def events_of(engine: Engine, *requests: GenerationRequest) -> list[TokenEvent]:
    for r in requests:
        engine.add(r)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        check(engine)
    return events


class Oracle:
    """Knows every answer. Drafts what comes next, `wrong` being added to every token."""

    def __init__(self, answers: dict[int, list[int]], wrong: int = 0) -> None:
        self.answers, self.wrong = answers, wrong

    def __call__(self, sequence: Sequence, most: int) -> list[int]:
        n = len(sequence.output)
        return [(t + self.wrong) % 512 for t in self.answers[sequence.id][n : n + most]]


class Guessing:
    """Drafts tokens at random, as many as it likes."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, sequence: Sequence, most: int) -> Tokens[int]:
        return [self.rng.randrange(512) for _ in range(self.rng.randint(0, most))]


@pytest.mark.parametrize("drafts", [1, 4, 9])
def test_greedy_answers_are_the_same_with_drafts(host: HostClient, baseline: Artifact, drafts: int) -> None:
    plain, engine = Engine(host, baseline), Engine(host, baseline, SchedulerConfig(draft_tokens=drafts))
    assert run(engine, *crowd()) == run(plain, *crowd())
    assert engine.accepted_tokens > 0 and engine.steps < plain.steps
    assert engine.generated_tokens == plain.generated_tokens and engine.prompt_tokens == plain.prompt_tokens


@pytest.mark.parametrize("config", [
    SchedulerConfig(max_batch_tokens=7, prefill_chunk=5, draft_tokens=3),
    SchedulerConfig(max_batch_tokens=20, policy="prefill_first", draft_tokens=3),
    SchedulerConfig(max_batch_tokens=20, policy="decode_first", max_seqs=3, draft_tokens=3, draft_ngram=1),
])  # fmt: skip
def test_chunks_and_policies_change_no_tokens(host: HostClient, baseline: Artifact, config: SchedulerConfig) -> None:
    plain = run(Engine(host, baseline, replace(config, draft_tokens=0)), *crowd(25))
    engine = Engine(host, baseline, config)
    assert run(engine, *crowd(25)) == plain
    assert engine.accepted_tokens > 0


def test_an_always_wrong_drafter_changes_nothing(host: HostClient, baseline: Artifact) -> None:
    """Neither a token nor a step, and what it wrote is no context of anybody's."""
    plain = Engine(host, baseline)
    answers = run(plain, *crowd())
    engine = drafting(Engine(host, baseline, CONFIG), Oracle(answers, wrong=1))
    assert run(engine, *crowd()) == answers
    assert engine.accepted_tokens == 0 and engine.drafted_tokens > 1000
    assert engine.steps == plain.steps
    assert engine.lanes[0].scheduler.blocks.available == plain.lanes[0].scheduler.blocks.available


def test_a_random_drafter_changes_no_token(host: HostClient, baseline: Artifact) -> None:
    answers = run(Engine(host, baseline), *crowd())
    assert run(drafting(Engine(host, baseline, CONFIG), Guessing()), *crowd()) == answers


def test_an_always_right_drafter_makes_five_tokens_a_step(host: HostClient, baseline: Artifact) -> None:
    asked = request(1, prompt(1, 20), tokens=41)
    answers = run(Engine(host, baseline), asked)
    engine = drafting(Engine(host, baseline, CONFIG), Oracle(answers))
    assert run(engine, asked) == answers
    assert engine.steps == 1 + 40 / 5
    assert engine.drafted_tokens == engine.accepted_tokens == 32


def test_repetitive_text_takes_far_fewer_steps(host: HostClient, baseline: Artifact) -> None:
    asked = request(1, prompt(1, 20), tokens=100, sampling=forced(44, ignore_eos=True))
    plain, engine = Engine(host, baseline), Engine(host, baseline, CONFIG)
    assert run(engine, asked) == run(plain, asked)
    assert plain.steps == 100 and engine.steps < 30


@pytest.mark.parametrize("drafter", [None, Guessing()])
def test_a_seeded_request_draws_the_same_tokens(host: HostClient, baseline: Artifact, drafter: Drafter | None) -> None:
    """With penalties, filters and log probabilities: drafts take no random number of their own."""
    engine = Engine(host, baseline, CONFIG)
    if drafter:
        drafting(engine, drafter)
    expected = by_request(events_of(Engine(host, baseline), *crowd(25, WARM)))
    found = by_request(events_of(engine, *crowd(25, WARM)))
    for number, events in expected.items():
        assert [e.token_id for e in found[number]] == [e.token_id for e in events]
        assert [[t for t, _ in e.top] for e in found[number]] == [[t for t, _ in e.top] for e in events]
        assert [e.logprob for e in found[number]] == pytest.approx([e.logprob for e in events], abs=1e-4)
    assert engine.drafted_tokens > 0


def by_request(events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
    found: dict[int, list[TokenEvent]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    return found


def test_every_sampled_answer_comes_with_its_own_seed_only(host: HostClient, baseline: Artifact) -> None:
    warm = SamplingParams(temperature=1.3, ignore_eos=True)
    one, two = ([request(i, looping(3, 20), 8, replace(warm, seed=i + s)) for i in range(4)] for s in (0, 100))
    first, second = (run(Engine(host, baseline, CONFIG), *side) for side in (one, two))
    assert all(first[i] != second[i] for i in first)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        (forced(2), 1, "stop"),
        (forced(2, ignore_eos=True), 9, "length"),
        (forced(2, min_tokens=5), 6, "stop"),
        (forced(44, stop_token_ids=(44,)), 1, "stop"),
        (forced(44), 9, "length"),
    ],
)
def test_an_answer_ends_where_it_would_have(
    host: HostClient, baseline: Artifact, sampling: SamplingParams, tokens: int, reason: str
) -> None:
    """Drafts that hold past the end of an answer are not said, nor counted."""
    engine = drafting(Engine(host, baseline, CONFIG), lambda sequence, most: [2, 44, 2, 2][:most])
    events = events_of(engine, request(1, prompt(1, 4), 9, sampling))
    assert (len(events), events[-1].finish_reason) == (tokens, reason)
    assert engine.generated_tokens == tokens and engine.accepted_tokens < tokens


def test_generation_ends_with_the_context(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline, CONFIG, max_context=40)
    events = events_of(engine, request(1, prompt(1, 30), 100, forced(44)))
    assert len(events) == 10 and events[-1].finish_reason == "length"


def test_preempted_requests_give_the_same_tokens(host: HostClient, baseline: Artifact) -> None:
    requests = [request(i, looping(i + 2, 30), tokens=60) for i in range(3)]
    roomy = run(Engine(host, baseline), *requests)
    cramped = Engine(host, baseline, CONFIG, kv_bytes=7 * BLOCK_BYTES)
    assert run(cramped, *requests) == roomy
    assert cramped.stats()["preemptions"] > 0 and cramped.accepted_tokens > 0


def test_an_aborted_request_frees_its_blocks(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline, CONFIG)
    for number in (1, 2):
        engine.add(request(number, looping(number + 1, 40), 30))
    for _ in range(3):
        engine.step()
    assert engine.abort(1) and set(finish(engine)) == {2}
    assert engine.stats()["kv_blocks_free"] == engine.stats()["kv_blocks"]


def test_a_stream_goes_on_with_drafts_after_a_swap(host: HostClient, baseline: Artifact, other: Artifact) -> None:
    asked = request(1, looping(3, 30), tokens=40)
    alone = run(Engine(host, baseline), asked)[1]
    engine = Engine(host, baseline, CONFIG)
    engine.add(asked)
    events = [e for _ in range(4) for e in engine.step()]
    engine.swap(other, policy="recompute")
    while engine.has_work:
        events += engine.step()
    assert [e.token_id for e in events] == alone


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 3])
def test_the_prefix_cache_holds_no_rejected_token(host: HostClient, baseline: Artifact, length: int) -> None:
    """Every name in the cache is of what was really said, and what is found under it gives the same tokens."""
    asked = request(1, prompt(1, length), tokens=2 * BLOCK + 5)
    answers = run(Engine(host, baseline), asked)
    engine = drafting(Engine(host, baseline, SchedulerConfig(draft_tokens=BLOCK + 2)), Oracle(answers, wrong=1))
    assert run(engine, asked) == answers
    blocks, said = engine.lanes[0].scheduler.blocks, [*asked.prompt_ids, *answers[1]]
    full = (len(said) - 1) // BLOCK
    found = blocks.match(said)
    assert len(found.blocks) == full == len(blocks._by_name)
    blocks.release(found)
    again = request(2, said, tokens=8)
    fresh = run(Engine(host, baseline), again)
    engine.lanes[0].scheduler.draft = Oracle(fresh, wrong=1)
    events = events_of(engine, again)
    assert [e.token_id for e in events] == fresh[2] and events[0].cached_tokens == full * BLOCK


def test_drafts_are_counted(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline, CONFIG)
    run(engine, request(1, prompt(1, 20), tokens=40, sampling=forced(44, ignore_eos=True)))
    text = Metrics(engine.stats).text().decode()
    assert f"polymorph_drafted_tokens_total {float(engine.drafted_tokens)}" in text
    assert f"polymorph_accepted_tokens_total {float(engine.accepted_tokens)}" in text
    assert engine.drafted_tokens >= engine.accepted_tokens > 20


ANSWERS = 1200
TOP = 3
SPREAD = SamplingParams(temperature=1.0, top_k=TOP, ignore_eos=True)
START = prompt(5, 12)


class AcceptsAlways(Engine):
    """A planted fault: a draft stands, whatever its row drew."""

    def _run(self, lane: Lane, plan: list[Scheduled]) -> StepDone:
        done = super()._run(lane, plan)
        row = 0
        for p in plan:
            done.token_ids[row : row + len(p.drafts)] = p.drafts
            row += (1 + len(p.drafts)) * p.samples
        return done


def pairs(engine: Engine, draft: int) -> Counter[tuple[int, int]]:
    """The first two tokens of many seeded answers to one prompt; the second is verified against `draft`."""
    drafting(engine, lambda sequence, most: [draft])
    requests = [request(i, START, 3, replace(SPREAD, seed=i)) for i in range(ANSWERS)]
    found = by_request(events_of(engine, *requests))
    assert engine.drafted_tokens == ANSWERS
    return Counter((events[0].token_id, events[1].token_id) for events in found.values())


def law(host: HostClient, baseline: Artifact, text: list[int]) -> dict[int, float]:
    """The distribution of the token after `text`: the best three, renormalised."""
    asked = request(1, text, 1, SamplingParams(temperature=0, logprobs=TOP))
    (event,) = events_of(Engine(host, baseline), asked)
    shares = np.exp([v for _, v in event.top])
    return dict(zip([t for t, _ in event.top], (shares / shares.sum()).tolist(), strict=True))


def test_sampled_answers_have_the_models_distribution_whatever_is_drafted(host: HostClient, baseline: Artifact) -> None:
    first = law(host, baseline, START)
    expected = {(a, b): p * q for a, p in first.items() for b, q in law(host, baseline, [*START, a]).items()}
    draft = max(expected, key=lambda pair: expected[pair])[1]

    def p_value(found: Counter[tuple[int, int]]) -> float:
        if set(found) - set(expected):
            return 0.0
        return float(stats.chisquare([found[c] for c in expected], [expected[c] * ANSWERS for c in expected]).pvalue)

    config = SchedulerConfig(max_batch_tokens=2048, max_seqs=64, draft_tokens=1)
    honest = Engine(host, baseline, config)
    assert p_value(pairs(honest, draft)) > 1e-3
    assert 0 < honest.accepted_tokens < ANSWERS
    assert p_value(pairs(AcceptsAlways(host, baseline, config), draft)) < 1e-6
