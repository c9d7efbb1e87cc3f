"""Before and after over HTTP: two equal servers, paired windows in turns, and failures that name their side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.artifacts import Artifact
from optimizer.measure import end_to_end
from optimizer.measure.end_to_end import EndToEnd, Job, measure_end_to_end
from optimizer.measure.load import LoadRequest, Target, run_closed_loop
from optimizer.measure.samples import LoadResult
from optimizer.measure.servers import MeasureFailed, Server, ServerSpec
from tests.optimizer.scripted import SMALL

PAIRS = 3


@dataclass(frozen=True)
class Measured:
    result: EndToEnd
    told: list[tuple[str, int, int, float]]
    windows: list[tuple[str, list[LoadRequest], int]]  # address, requests, users; in the order run


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ServerSpec:
    return ServerSpec(tiny_model, "float32", threads=1, kv_bytes=8 << 20, name="tiny")


@pytest.fixture(scope="module")
def job(spec: ServerSpec, baseline: Artifact, twin: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Job:
    logs = tmp_path_factory.mktemp("measure")
    return Job(baseline.path, twin.path, SMALL, spec, logs, budget_s=8.0, seed=3, sweep=(1, 2))


@pytest.fixture(scope="module")
def measured(job: Job) -> Measured:
    """One measurement of the baseline and its twin."""
    told: list[tuple[str, int, int, float]] = []
    windows: list[tuple[str, list[LoadRequest], int]] = []

    def spy(target: Target, requests: Sequence[LoadRequest], users: int) -> LoadResult:
        windows.append((target.url, list(requests), users))
        return run_closed_loop(target, requests, users)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "MAX_PAIRS", PAIRS)
        patch.setattr(end_to_end, "run_closed_loop", spy)
        result = measure_end_to_end(job, lambda *told_now: told.append(told_now))
    return Measured(result, told, windows)


def test_every_scenario_is_measured_in_pairs_that_are_told(measured: Measured) -> None:
    scenarios = [*measured.result.scenarios]
    assert [s.name for s in scenarios] == ["heldout", "stable", "burst"]
    assert [s.concurrency for s in scenarios] == [2, 2, 4]
    assert [s.concurrency for s in measured.result.sweep] == [1, 2], "stable traffic stands for its own concurrency"
    ran = {s.name: s for s in (*scenarios, *measured.result.sweep)}
    assert [(name, pair) for name, pair, _, _ in measured.told] == [
        (name, pair + 1) for name in ("heldout", "stable", "burst", "concurrency 1") for pair in range(PAIRS)
    ]
    for name, scenario in ran.items():
        assert scenario.ratio.ratios == tuple(r for told, _, _, r in measured.told if told == name)
        assert all(math.isfinite(r) and r > 0 for r in scenario.ratio.ratios)
        assert scenario.ratio.ci_low <= scenario.ratio.ratio <= scenario.ratio.ci_high


def test_both_sides_do_equal_work_and_name_their_version(measured: Measured) -> None:
    for scenario in (*measured.result.scenarios, *measured.result.sweep):
        pairs = list(zip(scenario.windows["baseline"], scenario.windows["winner"], strict=True))
        assert len(pairs) == PAIRS
        for one, two in pairs:
            assert [(r.isl, r.osl) for r in one.requests] == [(r.isl, r.osl) for r in two.requests]
            assert {r.version for r in one.requests} == {"baseline"} and {r.version for r in two.requests} == {"winner"}
            assert not one.failed and not two.failed
            assert len(one.requests) == scenario.concurrency


def test_windows_take_turns_a_b_b_a(measured: Measured) -> None:
    urls = [url for url, _, _ in measured.windows]
    first, second = urls[:2]  # the warm-up, one of each side
    assert {first, second} == set(urls)
    expected = [first, second, second, first, first, second]
    assert urls[2:] == expected * 4


def test_no_server_sees_a_prompt_twice_nor_one_that_begins_as_another(measured: Measured) -> None:
    for url in {url for url, _, _ in measured.windows}:
        opened = [tuple(r.prompt[:8]) for to, requests, _ in measured.windows for r in requests if to == url]
        assert len(set(opened)) == len(opened)
    after_warm_up = [tuple(r.prompt[:8]) for _, requests, _ in measured.windows[2:] for r in requests]
    assert len(set(after_warm_up)) == len(after_warm_up), "nor do the two sides of a pair"


def test_side_scenarios_have_one_shape_and_cold_starts_are_told(measured: Measured) -> None:
    for scenario in measured.result.scenarios[1:]:
        assert len({(r.isl, r.osl) for w in scenario.windows["baseline"] for r in w.requests}) == 1
    assert set(measured.result.cold_start_s) == {"baseline", "winner"}
    assert all(seconds > 0 for seconds in measured.result.cold_start_s.values())
    point = measured.result.sweep[0].point("winner")
    assert point["ci_low"] <= point["output_tput"] <= point["ci_high"] and point["total_tput"] > 0


def test_both_servers_have_ended(measured: Measured) -> None:
    for url in {url for url, _, _ in measured.windows}:
        result = run_closed_loop(Target(url, "tiny"), [LoadRequest([5, 6], 1)], 1)
        assert result.requests[0].status == 0 and result.requests[0].error


def test_a_server_that_cannot_start_names_its_side_and_shows_its_log(job: Job, tmp_path: Path) -> None:
    with pytest.raises(MeasureFailed, match="The winner's server ended with code") as failed:
        measure_end_to_end(replace(job, winner=tmp_path / "no-artefact", log_dir=tmp_path))
    assert failed.value.side == "winner"
    assert "no-artefact" in failed.value.log_tail
    with pytest.raises(MeasureFailed) as failed:
        measure_end_to_end(replace(job, baseline=tmp_path / "no-artefact", log_dir=tmp_path))
    assert failed.value.side == "baseline"


@pytest.fixture
def bench(job: Job, tmp_path: Path) -> end_to_end._Bench:
    """The windows of two servers that are never asked: answers are given by the tests."""
    servers = {}
    for side in ("baseline", "winner"):
        log = tmp_path / side
        log.write_text(f"the {side}'s last words")
        servers[side] = Server(side, f"http://{side}", None, 1.0, log)  # type: ignore[arg-type]
    return end_to_end._Bench(job, servers, lambda *_: None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"error": "the engine ended"}, "the engine ended"),
        ({"osl": 3}, "wanted"),
        ({"isl": 1}, "wanted"),
        ({"version": "baseline"}, "from version winner; got"),
    ],
)
def test_one_wrong_answer_ends_the_measurement_and_names_its_side(
    bench: end_to_end._Bench, measured: Measured, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object], says: str
) -> None:
    right = measured.result.heldout.windows["winner"][0].requests[0]

    def answer(target: Target, requests: Sequence[LoadRequest], users: int) -> LoadResult:
        side = target.url.removeprefix("http://")
        made = [
            replace(right, index=i, isl=len(r.prompt), osl=r.max_tokens, version=side) for i, r in enumerate(requests)
        ]
        if side == "winner":
            made[-1] = replace(made[-1], **wrong)  # type: ignore[arg-type]
        return LoadResult(tuple(made), 1.0, users)

    monkeypatch.setattr(end_to_end, "run_closed_loop", answer)
    with pytest.raises(MeasureFailed, match="The winner answered a request wrongly") as failed:
        bench.warm_up()
    assert failed.value.side == "winner" and says in str(failed.value)
    assert failed.value.log_tail == "the winner's last words"


def test_a_person_can_stop_it_between_pairs_and_no_server_is_left(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    urls: set[str] = set()

    def spy(target: Target, requests: Sequence[LoadRequest], users: int) -> LoadResult:
        urls.add(target.url)
        return run_closed_loop(target, requests, users)

    def stop(*told: object) -> None:
        raise Stopped

    monkeypatch.setattr(end_to_end, "run_closed_loop", spy)
    with pytest.raises(Stopped):
        measure_end_to_end(replace(job, log_dir=tmp_path), stop)
    assert len(urls) == 2
    for url in urls:
        assert run_closed_loop(Target(url, "tiny"), [LoadRequest([5, 6], 1)], 1).requests[0].status == 0
