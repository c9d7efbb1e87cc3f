"""The engine on a real host: the same tokens however a request is scheduled, and versions kept apart."""

from __future__ import annotations

import os
import signal

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient, HostFailure
from engine.core import Engine
from engine.scheduler import SchedulerConfig
from engine.sequence import GenerationRequest, InvalidRequest, SamplingParams, TokenEvent
from engine.wire import HostStatus, Status

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BLOCK = 16
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, KV heads, head size, float32


def request(number: int, prompt: list[int], tokens: int = 12, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest(number, prompt, tokens, sampling, eos_ids=(2,))


def prompt(number: int, length: int) -> list[int]:
    return [(number * 37 + i * i * 7 + i) % 500 + 3 for i in range(length)]


def run(engine: Engine, *requests: GenerationRequest) -> dict[int, list[int]]:
    """Tokens by request, all of them submitted at once and run to their end."""
    for r in requests:
        engine.add(r)
    return finish(engine)


def finish(engine: Engine) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.finish_reason != "error", event.error
            tokens.setdefault(event.request_id, []).append(event.token_id)
        check(engine)
    return tokens


def check(engine: Engine) -> None:
    for lane in engine.lanes:
        lane.scheduler.blocks.check([s.allocation for s in lane.sequences.values()])


def test_a_crowd_changes_nobodys_tokens(host: HostClient, baseline: Artifact) -> None:
    requests = [request(i, prompt(i, 5 + 11 * i)) for i in range(6)]
    together = run(Engine(host, baseline), *requests)
    alone = [run(Engine(host, baseline), r)[r.id] for r in requests]
    assert [together[r.id] for r in requests] == alone
    assert all(len(tokens) == 12 for tokens in alone)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first", "decode_first"])
@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_chunks_and_policies_change_no_tokens(host: HostClient, baseline: Artifact, chunk: int, policy: str) -> None:
    requests = [request(1, prompt(1, 33)), request(2, prompt(2, 47), tokens=6)]
    whole = run(Engine(host, baseline), *requests)
    config = SchedulerConfig(max_batch_tokens=max(chunk, 2), prefill_chunk=chunk, policy=policy)
    assert run(Engine(host, baseline, config), *requests) == whole


def test_a_cached_prefix_gives_the_same_tokens(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline)
    first = run(engine, request(1, prompt(1, 50)))[1]
    engine.add(request(2, prompt(1, 50)))
    events = [e for _ in range(12) for e in engine.step()]
    assert events[0].cached_tokens == 3 * BLOCK
    assert [e.token_id for e in events] == first
    assert engine.stats()["cached_tokens"] == 3 * BLOCK


def test_preempted_requests_give_the_same_tokens(host: HostClient, baseline: Artifact) -> None:
    requests = [request(i, prompt(i, 30), tokens=60) for i in range(3)]
    roomy = run(Engine(host, baseline), *requests)
    cramped = Engine(host, baseline, kv_bytes=7 * BLOCK_BYTES)
    assert cramped.lanes[0].scheduler.blocks.total == 7
    assert run(cramped, *requests) == roomy
    assert cramped.stats()["preemptions"] > 0


def test_an_aborted_request_frees_its_blocks_and_is_silent(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline)
    for number in (1, 2):
        engine.add(request(number, prompt(number, 40)))
    engine.step()
    assert engine.abort(1) and not engine.abort(1)
    assert set(finish(engine)) == {2}
    assert engine.stats()["kv_blocks_free"] == engine.stats()["kv_blocks"]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (request(1, []), "empty"),
        (request(1, prompt(1, 512)), "512 tokens"),
        (request(1, [1, 512]), "outside 0..511"),
        (request(1, [-1]), "outside"),
        (request(1, [1], tokens=-3), "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_is_scheduled(
    host: HostClient, baseline: Artifact, bad: GenerationRequest, named: str
) -> None:
    engine = Engine(host, baseline)
    with pytest.raises(InvalidRequest, match=named):
        engine.add(bad)
    assert not engine.has_work


def test_generation_ends_with_the_context(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline, max_context=40)
    engine.add(request(1, prompt(1, 30), tokens=100))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert len(events) == 10 and events[-1].finish_reason == "length"


def forced(token: int, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, logit_bias={token: 100.0}, **changes)  # type: ignore[arg-type]


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
def test_when_generation_stops(
    host: HostClient, baseline: Artifact, sampling: SamplingParams, tokens: int, reason: str
) -> None:
    engine = Engine(host, baseline)
    engine.add(request(1, prompt(1, 4), 9, sampling))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert (len(events), events[-1].finish_reason) == (tokens, reason)


def test_a_seeded_request_draws_the_same_in_any_company(host: HostClient, baseline: Artifact) -> None:
    warm = SamplingParams(temperature=1.2, seed=7, ignore_eos=True)
    seeded = request(1, prompt(1, 20), sampling=warm)
    unseeded = [request(i, prompt(i, 9), sampling=SamplingParams(temperature=1.5, seed=100 + i)) for i in (2, 3)]
    alone = run(Engine(host, baseline), seeded)[1]
    assert run(Engine(host, baseline), *unseeded, seeded)[1] == alone
    again = run(Engine(host, baseline), request(9, prompt(1, 20), sampling=SamplingParams(temperature=1.2, seed=8)))[9]
    assert again != alone


def test_a_stream_ends_on_the_version_it_began_on(host: HostClient, baseline: Artifact, other: Artifact) -> None:
    before = host.call(Status())
    alone = run(Engine(host, baseline), request(1, prompt(1, 40), tokens=20))[1]
    engine = Engine(host, baseline)
    engine.add(request(1, prompt(1, 40), tokens=20))
    events = [e for _ in range(5) for e in engine.step()]
    assert engine.swap(other) > 0
    engine.add(request(2, prompt(1, 40), tokens=4))
    while engine.has_work:
        events += engine.step()
        check(engine)
    assert {e.version for e in events if e.request_id == 1} == {baseline.hash}
    assert {e.version for e in events if e.request_id == 2} == {other.hash}
    assert [e.token_id for e in events if e.request_id == 1] == alone
    after = host.call(Status())
    assert isinstance(before, HostStatus) and isinstance(after, HostStatus)
    assert (before.pid, before.weights_mapping) == (after.pid, after.weights_mapping)
    assert [r[0] for r in after.resident] == [other.hash], "the version that drained is unloaded"


def test_another_versions_keys_and_values_are_never_read(host: HostClient, baseline: Artifact, other: Artifact) -> None:
    engine = Engine(host, baseline)
    fresh = run(engine, request(1, prompt(1, 50)))[1]
    for number, artifact in ((2, other), (3, baseline)):
        engine.swap(artifact)
        engine.add(request(number, prompt(1, 50)))
        events = [e for _ in range(12) for e in engine.step()]
        assert {e.cached_tokens for e in events} == {0}
        assert [e.token_id for e in events] == fresh


def test_a_swap_back_while_the_first_version_drains_reuses_it(
    host: HostClient, baseline: Artifact, other: Artifact
) -> None:
    engine = Engine(host, baseline)
    engine.add(request(1, prompt(1, 50), tokens=30))
    engine.step()
    engine.swap(other)
    engine.add(request(2, prompt(2, 20), tokens=3))
    engine.step()
    engine.swap(baseline)
    assert [lane.artifact.hash for lane in engine.lanes] == [other.hash, baseline.hash]
    assert {len(t) for t in finish(engine).values()} == {28, 2}


def test_what_outstays_the_drain_is_computed_again_on_the_new_version(
    host: HostClient, baseline: Artifact, other: Artifact
) -> None:
    alone = run(Engine(host, baseline), request(1, prompt(1, 40), tokens=20))[1]
    now = [0.0]
    engine = Engine(host, baseline, clock=lambda: now[0])
    engine.add(request(1, prompt(1, 40), tokens=20))
    events = [e for _ in range(5) for e in engine.step()]
    engine.swap(other, deadline_s=30)
    events += engine.step()
    now[0] = 30.0
    while engine.has_work:
        events += engine.step()
    assert [e.token_id for e in events] == alone
    assert [e.version for e in events] == [baseline.hash] * 6 + [other.hash] * 14


def test_recompute_moves_everybody_at_once(host: HostClient, baseline: Artifact, other: Artifact) -> None:
    engine = Engine(host, baseline)
    engine.add(request(1, prompt(1, 40), tokens=8))
    engine.step()
    engine.swap(other, policy="recompute")
    assert {e.version for e in engine.step()} == {other.hash}
    assert len(engine.lanes) == 1


def broken(artifacts: ArtifactStore, baseline: Artifact, fault: str, name: str) -> Artifact:
    """The baseline with a fault at the start of its forward pass."""
    source = baseline.files()["forward.py"]
    head = "def __call__(self, batch: Batch, kv: KVPool) -> Tensor:\n"
    assert head in source
    return artifacts.put({"forward.py": source.replace(head, head + f"        {fault}\n")}, name=name)


def test_a_version_that_does_not_run_never_takes_over(
    host: HostClient, baseline: Artifact, artifacts: ArtifactStore
) -> None:
    engine = Engine(host, baseline)
    engine.add(request(1, prompt(1, 10), tokens=6))
    engine.step()
    with pytest.raises(HostFailure, match="planted"):
        engine.swap(broken(artifacts, baseline, "raise ValueError('planted')", "raises"))
    unusable = artifacts.put(baseline.files(), name="settings", settings={"max_seqs": 0})
    with pytest.raises(HostFailure, match="max_seqs"):
        engine.swap(unusable)
    assert engine.artifact == baseline and len(finish(engine)[1]) == 5
    status = host.call(Status())
    assert isinstance(status, HostStatus) and len(status.resident) == 1


def test_a_refused_step_ends_its_own_requests_only(
    host: HostClient, baseline: Artifact, artifacts: ArtifactStore
) -> None:
    fault = "assert 77 not in batch.token_ids.tolist(), 'planted'"
    engine = Engine(host, broken(artifacts, baseline, fault, "asserts"), SchedulerConfig(max_seqs=1))
    engine.add(request(1, [5, 77, 6]))
    engine.add(request(2, [5, 6, 7], tokens=3))
    with pytest.raises(HostFailure, match="planted") as caught:
        engine.step()
    assert not caught.value.fatal
    (event,) = engine.fail_step(caught.value.message)
    assert (event.request_id, event.finish_reason, event.error_code) == (1, "error", "engine_failed")
    assert "planted" in event.error
    assert len(finish(engine)[2]) == 3


def test_requests_go_on_after_their_host_was_killed(host: HostClient, baseline: Artifact) -> None:
    requests = [request(i, prompt(i, 20 + i), tokens=15) for i in (1, 2)]
    whole = run(Engine(host, baseline), *requests)
    engine = Engine(host, baseline)
    for r in requests:
        engine.add(r)
    events = [e for _ in range(6) for e in engine.step()]
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(HostFailure) as caught:
        engine.step()
    assert caught.value.fatal and caught.value.code == "host_exited"
    host.restart()
    events += engine.recover()
    while engine.has_work:
        events += engine.step()
        check(engine)
    assert {i: [e.token_id for e in events if e.request_id == i] for i in (1, 2)} == whole


def test_a_request_under_which_two_hosts_ended_gets_a_clear_error(host: HostClient, baseline: Artifact) -> None:
    engine = Engine(host, baseline)
    engine.add(request(1, prompt(1, 20)))
    events: list[TokenEvent] = []
    for _ in range(2):
        engine.step()
        os.kill(host.pid, signal.SIGKILL)
        with pytest.raises(HostFailure):
            engine.step()
        host.restart()
        events = engine.recover()
    assert [(e.finish_reason, e.error_code) for e in events] == [("error", "engine_restarted")]
    assert "twice" in events[0].error and not engine.has_work
    assert len(run(engine, request(2, prompt(1, 20), tokens=3))[2]) == 3
