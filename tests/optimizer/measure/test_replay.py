"""Traffic replayed through the scheduler: steady concurrency, equal work for every side."""

from __future__ import annotations

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.sequence import GenerationRequest
from optimizer.measure.replay import Replay, Work

KV = 1 << 20
REQUESTS = [Work(tuple(range(3 + i, 15 + 2 * i)), osl=4 + i) for i in range(6)]


@pytest.fixture
def replay(host: HostClient, baseline: Artifact) -> Replay:
    return Replay(host, baseline, KV)


def asked(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """What the engine is asked from now on."""
    seen: list[GenerationRequest] = []
    add = replay.engine.add

    def spy(request: GenerationRequest) -> object:
        seen.append(request)
        return add(request)

    monkeypatch.setattr(replay.engine, "add", spy)
    return seen


def test_so_many_requests_are_always_in_flight(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    replay.restart(REQUESTS, concurrency=3)
    flights: list[int] = []
    step = replay.engine.step

    def spy() -> list:
        flights.append(len(replay._running))
        return step()

    monkeypatch.setattr(replay.engine, "step", spy)
    replay.advance(60)
    assert set(flights) == {3}


def test_the_first_answers_are_cut_to_even_fractions_and_the_list_starts_again(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked(replay, monkeypatch)
    replay.restart(REQUESTS, concurrency=2)
    replay.advance(80)
    assert [r.max_tokens for r in seen[:2]] == [REQUESTS[0].osl // 2, REQUESTS[1].osl]
    assert [tuple(r.prompt_ids) for r in seen[:7]] == [w.prompt for w in [*REQUESTS, REQUESTS[0]]]
    assert len({r.id for r in seen}) == len(seen)


def test_every_side_gets_the_same_work_in_the_same_order(
    host: HostClient, replay: Replay, twin: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Replay(host, twin, KV)
    sides = [asked(r, monkeypatch) for r in (replay, other)]
    for r in (replay, other):
        r.restart(REQUESTS, concurrency=2)
    for _ in range(3):
        for r in (replay, other):
            r.advance(10)
    one, two = ([(tuple(r.prompt_ids), r.max_tokens) for r in side] for side in sides)
    assert one == two and len(one) > 4


def test_a_slice_is_whole_steps_and_its_time_is_of_the_tokens_asked_for(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay.restart(REQUESTS, concurrency=2)
    clock = iter(range(100))
    monkeypatch.setattr("optimizer.measure.replay.time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(replay, "_step", lambda: [object()] * 2)
    assert replay.advance(5) == pytest.approx(1.0 * 5 / 6), "six tokens took one tick"


def test_drafts_work_in_a_replay_as_they_do_in_serving(
    host: HostClient, baseline: Artifact, artifacts: ArtifactStore
) -> None:
    """From the version's own settings; a user sees all the tokens of a step."""
    settings = {**baseline.manifest.settings, "draft_tokens": 4}
    plain, drafting = (
        Replay(host, a, KV) for a in (baseline, artifacts.put(baseline.files(), name="drafts", settings=settings))
    )
    requests = [Work(tuple(3 + j % 3 for j in range(20)), osl=40)] * 3
    for replay in (plain, drafting):
        replay.restart(requests, concurrency=2)
        replay.advance(60)
    assert plain.engine.drafted_tokens == 0 < drafting.engine.accepted_tokens
    assert drafting.engine.steps < plain.engine.steps
    seconds = sorted(s for s, _ in drafting._decode_steps)
    assert drafting.interactivity > 1.05 / seconds[len(seconds) // 2]


def test_a_restart_drops_what_was_in_flight(replay: Replay) -> None:
    replay.restart(REQUESTS, concurrency=2)
    replay.advance(4)
    replay.restart(REQUESTS, concurrency=2)
    assert len(replay._running) == 2
    assert replay.engine.stats()["running"] + replay.engine.stats()["waiting"] == 2


def test_the_fastest_step_is_one_in_which_all_decoded(replay: Replay) -> None:
    replay.restart(REQUESTS, concurrency=2)
    replay.advance(20)
    assert 0 < replay.fastest_step_s < float("inf")
    replay.restart(REQUESTS, concurrency=1)
    replay.advance(5)
    assert replay.fastest_step_s < float("inf"), "a new trial has its own"
