"""Traffic with a temperature: what requests say of their sampling reaches every version that is measured, alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.sequence import SamplingParams
from optimizer.config import RunConfig
from optimizer.lab import Scene
from optimizer.measure import end_to_end
from optimizer.measure.load import LoadRequest, Target
from optimizer.measure.replay import Replay, Work
from optimizer.measure.samples import LoadResult, RequestSample
from optimizer.measure.servers import Server, ServerSpec
from optimizer.traffic.profile import TrafficProfile
from tests.optimizer.scripted import SMALL, data_folder

KV = 1 << 20
WARM = SMALL.sampled(0.9, 0.95)


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = data_folder(tmp_path_factory.mktemp("sampling"))
    return Scene.of(RunConfig(str(tiny_model), WARM.to_json(), str(folder), dtype="float32", threads=1))


def answers(replay: Replay, requests: list[Work], tokens: int = 60) -> dict[int, list[int]]:
    """Tokens that each request was answered with, by its place in the order of arrival."""
    made: dict[int, list[int]] = {}
    step, first = replay.engine.step, replay._next_id + 1

    def spy() -> list:
        events = step()
        for event in events:
            made.setdefault(event.request_id - first, []).append(event.token_id)
        return events

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.engine, "step", spy)
        replay.restart(requests, concurrency=2)
        replay.advance(tokens)
    return made


def test_the_traffics_sampling_reaches_every_request_of_a_trial(scene: Scene) -> None:
    requests = scene.requests(12, seed=5)
    assert {(w.sampling.temperature, w.sampling.top_p, w.sampling.ignore_eos) for w in requests} == {(0.9, 0.95, True)}
    assert len({w.sampling.seed for w in requests}) == 12
    assert requests == scene.requests(12, seed=5), "a resumed run asks the same"
    assert {w.sampling.seed for w in requests}.isdisjoint(w.sampling.seed for w in scene.requests(12, seed=6))


def test_the_same_request_draws_the_same_tokens_on_both_sides(
    host: HostClient, baseline: Artifact, twin: Artifact, scene: Scene
) -> None:
    requests = scene.requests(20, seed=5)
    one, two = (answers(Replay(host, a, KV), requests) for a in (baseline, twin))
    assert one == two and sum(map(len, one.values())) >= 60
    greedy = answers(
        Replay(host, baseline, KV), [replace(w, sampling=SamplingParams(temperature=0.0)) for w in requests]
    )
    assert greedy != one, "they are drawn, not the likeliest"
    other = [replace(w, sampling=replace(w.sampling, seed=w.sampling.seed + 1)) for w in requests]
    assert answers(Replay(host, twin, KV), other) != one, "a seed of the side's own would show"


def test_a_setting_that_drafts_is_judged_on_what_sampled_answers_repeat(
    host: HostClient, baseline: Artifact, artifacts: ArtifactStore
) -> None:
    """Greedy answers of this model loop and nearly every draft holds; drawn at temperature 1 one in four does."""
    settings = {**baseline.manifest.settings, "draft_tokens": 4}
    drafting = Replay(host, artifacts.put(baseline.files(), name="drafts", settings=settings), KV)
    prompts = [tuple(3 + (i + j) % 5 for j in range(20)) for i in range(4)]
    steps: dict[float, int] = {}
    held: dict[float, float | None] = {}
    for temperature in (0.0, 1.0):
        how = [SamplingParams(temperature=temperature, ignore_eos=True, seed=7 + i) for i in range(4)]
        before = drafting.engine.steps
        drafting.restart([Work(p, 60, s) for p, s in zip(prompts, how, strict=True)], concurrency=2)
        drafting.advance(200)
        steps[temperature], held[temperature] = drafting.engine.steps - before, drafting.accepted_share
    greedy, sampled = held[0.0], held[1.0]
    assert greedy is not None and sampled is not None, "drafts were made both times"
    assert greedy > 0.8 and 0 < sampled < 0.5
    assert steps[1.0] > 2 * steps[0.0], "the same tokens take more steps: most of the gain was the loops'"


def test_tokens_are_the_same_with_drafts_and_without_when_requests_sample(
    host: HostClient, baseline: Artifact, artifacts: ArtifactStore, scene: Scene
) -> None:
    settings = {**baseline.manifest.settings, "draft_tokens": 3}
    drafting = artifacts.put(baseline.files(), name="drafts", settings=settings)
    requests = [replace(w, prompt=tuple(3 + j % 3 for j in range(16))) for w in scene.requests(12, seed=5)]
    plain, drafted = (answers(Replay(host, a, KV), requests) for a in (baseline, drafting))
    for place in plain.keys() & drafted.keys():
        both = min(len(plain[place]), len(drafted[place]))
        assert plain[place][:both] == drafted[place][:both]


def test_both_servers_are_sent_the_same_seeds_and_temperature(
    tiny_model: Path, baseline: Artifact, twin: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[dict[str, object]]] = {"baseline": [], "winner": []}

    def answer(target: Target, requests: Sequence[LoadRequest], users: int) -> LoadResult:
        side = target.url.removeprefix("http://")
        asked[side] += [r.sampling for r in requests]
        return LoadResult(tuple(answered(i, r, side) for i, r in enumerate(requests)), 1.0, users)

    monkeypatch.setattr(end_to_end, "run_closed_loop", answer)
    for profile, temperature in ((WARM, 0.9), (SMALL, 0.0)):
        bench = measured_by(profile, tiny_model, baseline, twin, tmp_path)
        bench.sides(bench.heldout(deadline=0.0), deadline=1e12)
        assert asked["baseline"] == asked["winner"]
        assert {s["temperature"] for s in asked["baseline"]} == {temperature}
        if temperature:
            seeds = [s["seed"] for s in asked["baseline"]]
            window = WARM.concurrency * end_to_end.MIN_PAIRS
            assert len(set(seeds[:window])) == window, "requests side by side draw numbers of their own"
        asked["baseline"].clear(), asked["winner"].clear()


def measured_by(
    profile: TrafficProfile, model: Path, baseline: Artifact, winner: Artifact, folder: Path
) -> end_to_end._Bench:
    spec = ServerSpec(model, "float32", threads=1, kv_bytes=8 << 20, name="tiny")
    job = end_to_end.Job(baseline.path, winner.path, profile, spec, folder, seed=3, sweep=(1, 2))
    sides = {side: Server(side, f"http://{side}", None, 1.0, folder / side) for side in ("baseline", "winner")}  # type: ignore[arg-type]
    return end_to_end._Bench(job, sides, lambda *_: None)


def answered(index: int, request: LoadRequest, side: str) -> RequestSample:
    isl, osl = len(request.prompt), request.max_tokens
    return RequestSample(index, 0.0, 0.0, 0.1, (0.1,) * (osl - 1), 1.0, isl, osl, 200, version=side)
