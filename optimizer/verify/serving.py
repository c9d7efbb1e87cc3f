"""Contamination through the scheduler that serves: a pool of seven blocks forces eviction and pre-emption.

Each case runs twice on the same schedule: on a pool that nobody used, and on one that others left dirty. Tokens and
their log probabilities must be the same to the bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.core import Engine
from engine.scheduler import SchedulerConfig
from engine.sequence import GenerationRequest, SamplingParams
from engine.wire import Fill
from optimizer.measure.rig import Tokens
from optimizer.records import Check, Verdict
from optimizer.verify.bench import Bench
from optimizer.verify.contamination import FINITE, Checker

POOL = 7
ANSWER = 12
DRAFTS = 3
FIRST_ID = 1  # of an engine that has run no step
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, ignore_eos=True, logprobs=0)
Stream = list[tuple[int, bytes]]  # token and the bits of its log probability


def eviction(bench: Bench) -> list[Check]:
    """More requests than seven blocks hold: some are pre-empted, all are recomputed right."""
    prompts = pressing(bench)
    clean, _ = run(open_engine(bench), prompts)
    engine = open_engine(bench)
    run(engine, pressing(bench))
    poison_free(bench, engine)
    dirty, preempted = run(engine, prompts)
    found = compare(bench, "eviction and pre-emption", "a pool others left dirty", clean, dirty)
    found = replace(found, detail=f"{preempted} pre-emptions in {POOL} blocks")
    untested = preempted == 0 and found.verdict is Verdict.PASS
    return [replace(found, verdict=Verdict.INCONCLUSIVE) if untested else found]


def abort(bench: Bench) -> list[Check]:
    """A neighbour that is aborted in mid-answer leaves nothing behind, and its blocks' next holder finds nothing."""
    size = bench.block_size
    target, later = bench.passage(size + 3), bench.passage(2 * size)

    def answers(neighbour: Tokens) -> list[Stream]:
        engine = open_engine(bench)
        return run(engine, [target, neighbour], abort_second_after=4, then=later)[0]

    one, two = answers(bench.passage(2 * size - 1)), answers(bench.passage(2 * size - 1))
    # the aborted neighbour's own text differs between the two runs; what the others say must not
    return [compare(bench, "abort", "neighbour aborted in mid-answer", [one[0], one[2]], [two[0], two[2]])]


def shared_prefix(bench: Bench) -> list[Check]:
    """Two requests with one prefix admitted in one step: none may read blocks that the other is still writing."""
    size = bench.block_size
    prefix, alien = bench.passage(size + 2), bench.passage(size + 2)
    tails = [bench.noise(4) for _ in range(2)]

    def answers(first: Tokens) -> list[Stream]:
        engine = open_engine(bench)
        poison_free(bench, engine)
        return run(engine, [first + tails[0], prefix + tails[1]])[0]

    expected, got = answers(alien), answers(prefix)
    return [compare(bench, "shared prefix", "admitted in one step", expected[1:], got[1:])]


def sampling(bench: Bench) -> list[Check]:
    """Seeded sampling beside greedy neighbours of other text: the same tokens."""
    size = bench.block_size
    target = bench.passage(size + 1)
    params = [SEEDED, GREEDY, SEEDED]

    def answer() -> list[Stream]:
        others = [bench.passage(size - 2), bench.passage(size - 2)]
        return run(open_engine(bench), [target, *others], sampling_of=params)[0][:1]

    return [compare(bench, "seeded sampling", "other text beside it", answer(), answer())]


def rejected_drafts(bench: Bench) -> list[Check]:
    """Drafts that are always wrong: whatever they were, no bit of an answer may tell."""
    prompts = pressing(bench)
    right, _ = run(open_engine(bench), prompts)

    def answers(wrong: int) -> tuple[list[Stream], int]:
        engine = open_engine(bench, drafts=DRAFTS)
        engine.lanes[-1].scheduler.draft = lambda sequence, most: [
            (token + wrong) % bench.config.vocab_size
            for token, _ in right[sequence.id - FIRST_ID][len(sequence.output) :][:most]
        ]
        return run(engine, prompts)[0], engine.accepted_tokens

    (one, held), (two, also_held) = answers(1), answers(2)
    found = compare(bench, "rejected drafts", "other wrong drafts", one, two)
    # a draft that held after all makes the steps of the two runs differ in shape
    return [replace(found, verdict=Verdict.INCONCLUSIVE) if held or also_held else found]


def pressing(bench: Bench) -> list[Tokens]:
    """Four prompts of one block whose answers need a second one each: eight blocks, and the pool has seven."""
    return [bench.passage(max(2, bench.block_size - 2)) for _ in range(4)]


def open_engine(bench: Bench, drafts: int = 0) -> Engine:
    """A fresh pool of exactly seven blocks. The candidate's own drafts would let the shapes of steps depend on content."""
    kv_bytes = POOL * bench.shape.bytes_per_block
    bench.rigs.pop(bench.candidate.hash, None)
    config = replace(SchedulerConfig.from_settings(bench.candidate.manifest.settings), draft_tokens=drafts)
    return Engine(bench.host, bench.candidate, config, layers=bench.layers, kv_bytes=kv_bytes)


def poison_free(bench: Bench, engine: Engine) -> None:
    """An idle engine's blocks are all free; what the prefix cache still names is not asked for again."""
    blocks = np.arange(engine.lanes[-1].loaded.blocks, dtype=np.int32).tobytes()
    bench.host.call(Fill(bench.candidate.hash, blocks, FINITE, bench.layers))


def run(
    engine: Engine,
    prompts: Sequence[Tokens],
    abort_second_after: int = 0,
    then: Tokens | None = None,
    sampling_of: Sequence[SamplingParams] = (),
) -> tuple[list[Stream], int]:
    """Answers of all prompts, in order, and pre-emptions. `then` is asked once the others have ended."""
    offset = engine.steps * 1000 + FIRST_ID  # numbers that were not used before
    before = engine.stats()["preemptions"]
    streams: dict[int, Stream] = {}

    def ask(prompt: Tokens, params: SamplingParams) -> None:
        request_id = offset + len(streams)
        streams[request_id] = []
        engine.add(GenerationRequest(request_id, list(prompt), ANSWER, params))

    def answer() -> None:
        steps = 0
        while engine.has_work:
            for event in engine.step():
                streams[event.request_id].append((event.token_id, struct.pack("<d", event.logprob)))
            steps += 1
            if steps == abort_second_after:
                engine.abort(offset + 1)

    for i, prompt in enumerate(prompts):
        ask(prompt, sampling_of[i] if sampling_of else GREEDY)
    answer()
    if then is not None:
        ask(then, GREEDY)
        answer()
    return list(streams.values()), int(engine.stats()["preemptions"] - before)


def compare(bench: Bench, check: str, case: str, one: list[Stream], two: list[Stream]) -> Check:
    differ = sum(a != b for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=False))
    differ += sum(abs(len(x) - len(y)) for x, y in zip(one, two, strict=True))
    return bench.result(check, "contamination", case, float(differ), 0.0, "tokens that differ", differ == 0)


CHECKS: dict[str, Checker] = {
    "eviction and pre-emption": eviction,
    "abort": abort,
    "shared prefix": shared_prefix,
    "seeded sampling": sampling,
    "rejected drafts": rejected_drafts,
}
