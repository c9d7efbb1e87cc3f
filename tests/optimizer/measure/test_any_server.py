"""The load generator against a real OpenAI-compatible server, as it measures a customer's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.artifacts import Artifact
from optimizer.measure.http_stream import HttpError
from optimizer.measure.load import LoadRequest, Target, run_closed_loop, run_open_loop
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def api(tiny_model: Path, baseline: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--model", str(tiny_model), "--name", "tiny", "--artifact", str(baseline.path)]
    arguments += ["--dtype", "float32", "--threads", "1", "--kv-bytes", str(8 << 20), "--version-id", "v7"]
    with serve("engine.api", arguments, tmp_path_factory.mktemp("api") / "api.log") as server:
        yield server


def prompt(number: int, length: int) -> list[int]:
    return [(number * 37 + i * i * 7 + i) % 500 + 3 for i in range(length)]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_every_answer_has_the_length_asked_for(api: Server, suffix: str) -> None:
    requests = [LoadRequest(prompt(i, 10 + i), 5 + i) for i in range(5)]
    result = run_closed_loop(Target(api.url + suffix, "tiny"), requests, 2)
    assert [r.error for r in result.requests] == [""] * 5
    assert [(r.isl, r.osl) for r in result.requests] == [(10 + i, 5 + i) for i in range(5)]
    assert {r.finish_reason for r in result.requests} == {"length"} and {r.version for r in result.requests} == {"v7"}
    assert all(0 < r.ttft_s <= r.e2el_s for r in result.requests)
    assert result.output_tput * result.duration_s == pytest.approx(sum(range(5, 10)))
    summary = result.summary()
    assert summary["conc"] == 2 and summary["failed"] == 0 and summary["osl"] == 7.0
    assert all(summary[f"median_{name}"] > 0 for name in ("ttft", "tpot", "itl", "e2el", "intvty"))


def test_chat_and_text_prompts_are_counted_by_the_server(api: Server) -> None:
    chat = run_closed_loop(Target(api.url, "tiny", style="chat"), [LoadRequest("the quick fox", 6)] * 2, 1)
    text = run_closed_loop(Target(api.url, "tiny"), [LoadRequest("the quick fox", 6)], 1)
    assert [r.osl for r in (*chat.requests, *text.requests)] == [6, 6, 6]
    assert chat.requests[0].isl > text.requests[0].isl > 0, "the chat template adds its own"


def test_an_open_loop_keeps_the_times_it_was_given(api: Server) -> None:
    requests = [LoadRequest(prompt(20 + i, 12), 4, at=0.05 * i) for i in range(4)]
    result = run_open_loop(Target(api.url, "tiny"), requests)
    assert not result.failed and result.concurrency == 0
    assert [r.intended_s for r in result.requests] == [0.05 * i for i in range(4)]
    assert all(r.sent_s >= r.intended_s for r in result.requests)


def test_a_prefix_that_came_before_is_seen_as_cached(api: Server) -> None:
    shared = prompt(90, 40)
    requests = [LoadRequest([*shared, 5 + i], 3) for i in range(2)]
    result = run_closed_loop(Target(api.url, "tiny"), requests, 1)
    assert [r.cached_tokens for r in result.requests] == [0, 32]
    assert result.summary()["cached_tokens"] == 32


def test_what_the_server_refuses_is_kept_with_its_own_words(api: Server) -> None:
    wrong_name = run_closed_loop(Target(api.url, "unknown"), [LoadRequest([5], 2)], 1).requests[0]
    assert wrong_name.status == 404 and "unknown" in wrong_name.error
    target = Target(api.url, "tiny")
    mixed = run_closed_loop(target, [LoadRequest(prompt(1, 600), 2), LoadRequest(prompt(1, 20), 2)], 1)
    assert [bool(r.error) for r in mixed.requests] == [True, False]
    assert mixed.requests[0].status == 400 and "512" in mixed.requests[0].error
    assert mixed.output_tput * mixed.duration_s == pytest.approx(2)
    with pytest.raises(HttpError, match="warm-up"):
        run_closed_loop(target, [LoadRequest([5], 2)], 1, warmup=[LoadRequest(prompt(1, 600), 2)])
