"""Tiers 1 and 2 on a real host: wrong programs are refused, slow ones discarded, equal ones never kept."""

from __future__ import annotations

from itertools import groupby

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient, HostFailure
from engine.models.config import ModelConfig
from engine.wire import BlockDone, HostStatus, Status, TimedBlock
from optimizer.cost.roofline import Workload
from optimizer.measure.replay import Work
from optimizer.measure.tiers import (
    SPARE,
    Content,
    Rule,
    TierOne,
    TierTwo,
    TooFast,
    WrongValues,
    pool_bytes,
)
from optimizer.records import State
from optimizer.verify.faults import SPOILS_INPUTS
from tests.optimizer.scripted import BASELINE, SLOW, behind

WORK = Workload(concurrency=2, isl=20, osl=8, prefill_tokens=20)
RULE = Rule(margin=0.1, looks=(3, 5, 8), limit_s=20.0)


@pytest.fixture
def one(host: HostClient, tiny_config: ModelConfig, baseline: Artifact) -> TierOne:
    return TierOne(host, tiny_config, "float32", WORK, baseline, layers=1, seed=5, rule=RULE)


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
    one: TierOne, artifacts: ArtifactStore, baseline: Artifact
) -> None:
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
    begins = [("decode", "baseline"), ("decode", "candidate"), ("prefill", "baseline"), ("prefill", "candidate")]
    swapped = [("decode", "candidate"), ("decode", "baseline"), ("prefill", "candidate"), ("prefill", "baseline")]
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
        patch.setattr("optimizer.measure.tiers.MIN_BLOCK_S", 10.0)
        one._timed(one.reference, "decode", {"decode": 1})
    assert repeats[0] == 1 and repeats[-1] == 256 and repeats == sorted(repeats)


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
    found = two.measure(twin, incumbent=slow)
    assert found.over_incumbent is not None and found.over_incumbent.ratio > 1 > alone.ratio.ratio
    assert found.over_incumbent.pairs == found.ratio.pairs
    assert two.measure(twin, incumbent=baseline).over_incumbent is None
    assert resident(host) == {baseline.hash, slow.hash, twin.hash}
    two.keep(twin.hash)
    assert resident(host) == {baseline.hash, twin.hash}
    two.keep()
    assert resident(host) == {baseline.hash}


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
        ([0.16, 0.22], State.RETEST),  # cut short: two pairs settle nothing so wide
        ([1.5, 1.5, 1.5, 1.5], State.KEEP),  # cut short between two looks
    ],
)
def test_the_verdict_is_the_one_that_ended_the_measurement(ratios: list[float], state: State) -> None:
    assert Rule(margin=0.05, looks=(3, 5, 8)).state(ratios) is state
