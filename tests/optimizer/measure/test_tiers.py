"""Tiers 1 and 2 on a real host: wrong programs are refused, slow ones discarded, equal ones never kept."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient, HostFailure
from engine.models.config import ModelConfig
from engine.wire import BlockDone, HostStatus, Status, TimedBlock, Trace, Traced, Unload
from kernels.build import has_compiler
from optimizer.builder import Builder
from optimizer.cost.roofline import Workload
from optimizer.measure.replay import Work
from optimizer.measure.rig import Rig
from optimizer.measure.stats import PairedRatio
from optimizer.measure.tier_one import TierOne
from optimizer.measure.tiers import (
    CONTENT_USES,
    SPARE,
    Content,
    Repeats,
    Rule,
    TierTwo,
    TooFast,
    WrongValues,
    pool_bytes,
    standing,
)
from optimizer.records import Proposal, State
from optimizer.verify.faults import SPOILS_INPUTS
from tests.optimizer.scripted import BASELINE, SLOW, behind

WORK = Workload(concurrency=2, isl=20, osl=8, prefill_tokens=20)
RULE = Rule(margin=0.1, looks=(3, 5, 8), limit_s=20.0)


@pytest.fixture
def one(host: HostClient, tiny_config: ModelConfig, baseline: Artifact) -> TierOne:
    return TierOne(host, tiny_config, "float32", WORK, baseline, layers=1, seed=5, rule=RULE)


CALLS_A_LIBRARY = """

class Calling(Forward):
    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.library = settings.library("k")

    def __call__(self, batch, kv):
        self.library.f(NUMBER)
        return super().__call__(batch, kv)


def build(model, settings):
    return Calling(model, settings)
"""


def tier_two(host: HostClient, config: ModelConfig, baseline: Artifact, floor_s: float = 0.0) -> TierTwo:
    content = Content(config.vocab_size, 77)

    def requests(trial: int) -> list[Work]:
        return [Work(content.tokens(12 + i % 5), 6 + i % 3) for i in range(24)]

    kv = pool_bytes(config, "float32", 2 * 64)
    return TierTwo(host, config, "float32", WORK, baseline, requests, 9, RULE, 12, kv, floor_s)


@pytest.fixture
def two(host: HostClient, tiny_config: ModelConfig, baseline: Artifact) -> TierTwo:
    return tier_two(host, tiny_config, baseline)


@pytest.fixture(scope="module")
def slow(artifacts: ArtifactStore) -> Artifact:
    return artifacts.put({"forward.py": BASELINE + SLOW}, name="slow")


@pytest.fixture(scope="module")
def wrong(artifacts: ArtifactStore) -> Artifact:
    return artifacts.put({"forward.py": behind("Wrong", "return super().__call__(batch, kv).flip(-1)")}, name="wrong")


def resident(host: HostClient) -> set[str]:
    status = host.call(Status())
    assert isinstance(status, HostStatus)
    return {digest for digest, _ in status.resident}


def test_tier_one_refuses_wrong_values_and_goes_on(one: TierOne, wrong: Artifact, slow: Artifact) -> None:
    with pytest.raises(WrongValues, match="wrong values: mean KL"):
        one.measure(wrong)
    assert one.measure(slow).state is State.DISCARD


def test_tier_one_refuses_what_computes_otherwise_when_timed(
    one: TierOne, artifacts: ArtifactStore, baseline: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WrongValues, match=r"of 8 tokens chosen in timed decode steps . were the incumbent's"):
        one.measure(SPOILS_INPUTS.store(artifacts, baseline))
    monkeypatch.setattr("optimizer.measure.tier_one.MIN_SHARED", 0.0)
    with pytest.raises(WrongValues, match="chose other tokens than the same steps run untimed"):
        one.measure(SPOILS_INPUTS.store(artifacts, baseline))


def test_tier_one_tells_a_hang_from_a_slow_program(one: TierOne, artifacts: ArtifactStore) -> None:
    hangs = artifacts.put({"forward.py": behind("Hangs", "while True:\n    pass")}, name="hangs")
    with pytest.raises(HostFailure) as failure:
        one.measure(hangs, timeout_s=0.5)
    assert failure.value.code == "host_timeout" and failure.value.fatal


def test_tier_one_discards_a_slower_program(one: TierOne, slow: Artifact, host: HostClient, baseline: Artifact) -> None:
    found = one.measure(slow)
    assert found.state is State.DISCARD and found.ratio.ci_high < 1
    assert found.over_incumbent is None and found.first_step_s > 0 and found.device_s > 0
    assert resident(host) == {baseline.hash}, "the candidate was let go"


def test_tier_one_never_keeps_the_baselines_own_twin(one: TierOne, twin: Artifact) -> None:
    found = one.measure(twin)
    assert found.state is not State.KEEP
    assert found.ratio.pairs == len(found.ratio.ratios) >= 2


def test_tier_one_takes_turns_and_swaps_who_begins(
    one: TierOne, slow: Artifact, host: HostClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[str, str]] = []
    call = host.call

    def spy(message, timeout_s: float = 60.0):  # type: ignore[no-untyped-def]
        if isinstance(message, TimedBlock):
            timed.append(tuple(message.schedule_id.split("-")))
            assert (message.artifact_hash == slow.hash) is message.schedule_id.endswith("candidate")
        return call(message, timeout_s)

    monkeypatch.setattr(host, "call", spy)
    one.rule = Rule(0.1, looks=(4,), limit_s=60)
    assert one.measure(slow).ratio.pairs == 4
    turns = [(phase, side) for (phase, side), _ in groupby(timed)]
    begins = [("decode", "incumbent"), ("decode", "candidate"), ("prefill", "incumbent"), ("prefill", "candidate")]
    swapped = [("decode", "candidate"), ("decode", "incumbent"), ("prefill", "candidate"), ("prefill", "incumbent")]
    assert turns == [*begins, *swapped] * 2


def test_a_timed_block_is_repeated_until_a_clock_can_judge_it(
    one: TierOne, twin: Artifact, host: HostClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeats: list[int] = []

    def instant(message: TimedBlock, timeout_s: float = 60.0) -> BlockDone:
        repeats.append(message.repeats)
        return BlockDone(0.0, [1])

    with monkeypatch.context() as patch:
        patch.setattr(host, "call", instant)
        patch.setattr("optimizer.measure.tier_one.MIN_BLOCK_S", 10.0)
        one._timed(one.reference, "decode")
    assert repeats[0] == 1 and repeats[-1] == 256 and repeats == sorted(repeats)


def test_tier_one_pairs_a_candidate_with_the_incumbent(
    one: TierOne, slow: Artifact, twin: Artifact, baseline: Artifact, host: HostClient
) -> None:
    found = one.measure(twin, incumbent=slow)
    assert found.against == slow.hash and found.state is State.KEEP and found.ratio.ci_low > 1
    assert resident(host) == {baseline.hash, slow.hash}, "the incumbent stays ready"
    again = one.measure(twin)
    assert again.against == baseline.hash and again.state is not State.KEEP
    assert resident(host) == {baseline.hash}


def test_a_content_is_used_for_some_candidates_and_never_twice_for_one(
    one: TierOne, twin: Artifact, artifacts: ArtifactStore
) -> None:
    first = one.expected
    one.measure(twin)
    assert one.expected is first
    one.measure(twin)
    assert one.expected is not first, "a candidate that comes back sees a new one"
    second = one.expected
    for i in range(CONTENT_USES):
        one.measure(artifacts.put({"forward.py": BASELINE + f"\n# {i}\n"}, name=f"use {i}"))
    assert one.expected is not second and len(one.expected.seen) == 1


def test_pairs_of_earlier_visits_are_pooled(one: TierOne, slow: Artifact) -> None:
    one.rule = Rule(0.1, looks=(3, 6), limit_s=60, visits=(3, 6))
    found = one.measure(slow, earlier=[0.2, 0.3, 0.25])
    assert found.ratio.ratios[:3] == (0.2, 0.3, 0.25) and found.ratio.pairs == 6


def test_programs_of_other_text_that_do_the_same_have_one_behaviour(
    one: TierOne, artifacts: ArtifactStore, baseline: Artifact, host: HostClient
) -> None:
    heard: dict[str, str] = {}

    def behaviour(name: str, text: str, **settings: int) -> str:
        def judge(found: str) -> None:
            heard[name] = found
            raise Repeats(found, "")

        artifact = artifacts.put({"forward.py": text}, name=name, settings=settings)
        with pytest.raises(Repeats):
            one.measure(artifact, judge=judge)
        host.call(Unload(artifact.hash, one.layers))
        return heard[name]

    plain = behaviour("plain", BASELINE)
    renamed = BASELINE.replace("class Forward", "UNUSED = 3  # says nothing\n\n\nclass Forward").replace(
        "rotate(", "turned("
    )
    assert behaviour("renamed", renamed) == plain
    assert behaviour("unread setting", BASELINE, probe=3) == plain
    assert behaviour("another block size", BASELINE, block_size=32) != plain
    more = behind("More", "batch.positions.add(0)\nreturn super().__call__(batch, kv)")
    assert behaviour("one operator more", more) != plain


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_a_kernel_with_another_distance_behaves_otherwise_and_one_with_other_comments_does_not(
    host: HostClient, tiny_config: ModelConfig, tmp_path: Path, baseline: Artifact
) -> None:
    builder = Builder(tmp_path)
    kernel = """#include <cstdint>
    namespace { int64_t twice(int64_t x) { return DISTANCE * x; } }
    extern "C" int64_t f(int64_t x) { return twice(x); }
    """

    def behaviour(text: str, number: int = 5) -> str:
        forward = f"{BASELINE}{CALLS_A_LIBRARY}".replace("NUMBER", str(number))
        files = {"forward.py": forward, "k.cpp": text}
        built = builder.build(Proposal("k", "ada", "cache", "k", "why", "cpp", files))
        assert not built.failure, built.candidate.build_log
        rig = Rig(host, built.artifact, 1, 1 << 20)
        steps = [rig.batch(s) for s in Content(tiny_config.vocab_size, 1).script(1, 8, 1).steps([[0, 1]])]
        found = host.call(Trace(built.artifact.hash, steps, 1))
        assert isinstance(found, Traced) and found.behaviour, found
        rig.unload()
        return found.behaviour

    near = behaviour(kernel.replace("DISTANCE", "2"))
    assert behaviour("// said otherwise\n" + kernel.replace("DISTANCE", "2").replace("twice", "doubled")) == near
    assert behaviour(kernel.replace("DISTANCE", "4")) != near, "another number in the machine code"
    assert behaviour(kernel.replace("DISTANCE", "2"), number=6) != near, "another number in a call"


def test_tier_two_refuses_wrong_values(two: TierTwo, wrong: Artifact) -> None:
    with pytest.raises(WrongValues):
        two.measure(wrong, None)


def test_tier_two_refuses_what_no_memory_can_feed(
    host: HostClient, tiny_config: ModelConfig, baseline: Artifact, twin: Artifact
) -> None:
    with pytest.raises(TooFast, match=r"reading the weights alone takes 60000\.00 ms"):
        tier_two(host, tiny_config, baseline, floor_s=60.0).measure(twin, None)


def test_tier_two_discards_a_slower_program_and_never_keeps_a_twin(
    two: TierTwo, slow: Artifact, twin: Artifact
) -> None:
    assert two.measure(slow, None).state is State.DISCARD
    assert two.measure(twin, None).state is not State.KEEP


def test_tier_two_measures_against_the_baseline_and_the_incumbent_at_once(
    two: TierTwo, slow: Artifact, twin: Artifact, baseline: Artifact, host: HostClient
) -> None:
    alone = two.measure(slow, None)
    assert alone.over_incumbent is None
    two.standing.clear()
    found = two.measure(twin, incumbent=slow)
    assert found.over_incumbent is not None and found.over_incumbent.ratio > 1 > alone.ratio.ratio
    assert found.over_incumbent.pairs == found.ratio.pairs
    assert two.measure(twin, incumbent=baseline).over_incumbent is None
    assert resident(host) == {baseline.hash, slow.hash, twin.hash}
    two.keep(twin.hash)
    assert resident(host) == {baseline.hash, twin.hash}
    two.keep()
    assert resident(host) == {baseline.hash}


def test_tier_two_leaves_the_baseline_out_once_the_incumbents_speed_over_it_is_known(
    two: TierTwo, slow: Artifact, twin: Artifact, baseline: Artifact
) -> None:
    known = two.measure(slow, None).ratio
    two.replays[baseline.hash].advance = None  # type: ignore[method-assign, assignment]
    found = two.measure(twin, incumbent=slow)
    assert found.over_incumbent and found.beats is State.KEEP and found.against == baseline.hash
    assert found.ratio.ratio == pytest.approx(found.over_incumbent.ratio * known.ratio)
    assert found.ratio.ci_high / found.ratio.ci_low > found.over_incumbent.ci_high / found.over_incumbent.ci_low
    assert found.state is not State.KEEP, "a twin of the baseline, through a program four times as slow"
    assert two.measure(slow, incumbent=twin).beats is State.DISCARD


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [
        (1.2, 1.4, State.KEEP), (1.01, 1.4, State.MARGINAL), (0.9, 1.4, State.RETEST), (0.9, 1.04, State.DISCARD),
        (0.5, 0.6, State.DISCARD),
    ],
)  # fmt: skip
def test_the_verdict_of_a_chain_is_its_intervals(low: float, high: float, state: State) -> None:
    assert standing(PairedRatio(1.0, low, high, 4, low, high, 0.95, ()), 0.05) is state


def test_content_is_never_drawn_twice_and_repeats_by_seed_only() -> None:
    one, same, other = Content(500, 3), Content(500, 3), Content(500, 4)
    drawn = [one.tokens(8) for _ in range(20)]
    assert len(set(drawn)) == 20
    assert [same.tokens(8) for _ in range(20)] == drawn
    assert not {other.tokens(8) for _ in range(20)} & set(drawn)
    assert all(0 <= t < 500 for tokens in drawn for t in tokens)


def test_a_pool_holds_the_tokens_asked_for_with_room_to_spare(tiny_config: ModelConfig) -> None:
    a_token = 2 * 2 * 16 * 4  # keys and values, KV heads, head size, float32; of one layer
    assert pool_bytes(tiny_config, "float32", 100, layers=1) == SPARE * a_token * 356
    assert pool_bytes(tiny_config, "bfloat16", 100) == SPARE * a_token * 356


@pytest.mark.parametrize(
    ("ratios", "elapsed_s", "enough"),
    [
        ([], 99.0, False),  # no verdict without two pairs, whatever the time
        ([2.0], 99.0, False),
        ([1.0, 1.1], 1.0, False),
        ([1.0, 1.1], 2.0, True),  # time is up
        ([1.5, 1.5, 1.5], 0.1, True),  # settled and narrow at a look
        ([1.1, 1.5, 2.0], 0.1, False),  # wide
        ([0.5, 0.6, 0.5], 0.1, True),  # surely slower: how much is not asked
        ([1.0, 1.2, 0.9, 1.1, 1.0, 1.2, 0.9, 1.1], 0.1, True),  # the last look
    ],
)
def test_when_pairs_are_enough(ratios: list[float], elapsed_s: float, enough: bool) -> None:
    assert Rule(margin=0.05, limit_s=2.0).enough(ratios, elapsed_s) is enough


@pytest.mark.parametrize(
    ("ratios", "state"),
    [
        ([0.16, 0.22, 0.30], State.DISCARD),
        ([4.4, 3.3, 6.0], State.KEEP),
        ([1.2, 2.2], State.RETEST),  # cut short: two pairs settle nothing so wide
        ([0.16, 0.22], State.DISCARD),  # nothing settled, and it does not seem faster
        ([1.5, 1.5, 1.5, 1.5], State.KEEP),  # cut short between two looks
    ],
)
def test_the_verdict_is_the_one_that_ended_the_measurement(ratios: list[float], state: State) -> None:
    assert Rule(margin=0.05, looks=(3, 5, 8)).state(ratios) is state
