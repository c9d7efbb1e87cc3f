"""The load generator against a scripted server with known timestamps: every figure is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from optimizer.measure.http_stream import HttpError
from optimizer.measure.load import LoadRequest, Target, closed_loop, open_loop
from optimizer.measure.samples import LoadResult, Slo, join
from tests.optimizer.virtual_time import Script, ScriptedServer, Stream, run_virtual, scripted_server

approx = pytest.approx


def measure(
    script: Script,
    requests: Sequence[LoadRequest],
    concurrency: int = 0,
    warmup: Sequence[LoadRequest] = (),
    **target: Any,
) -> tuple[LoadResult, ScriptedServer]:
    """Closed loop with a concurrency, open loop without."""

    async def main() -> tuple[LoadResult, ScriptedServer]:
        async with scripted_server(script) as server:
            aim = Target(server.url, "demo", **target)
            if concurrency:
                return await closed_loop(aim, requests, concurrency, warmup), server
            return await open_loop(aim, requests, warmup), server

    return run_virtual(main())


def ask(*at: float) -> list[LoadRequest]:
    return [LoadRequest([1, 2, 3], 5, t) for t in at]


def test_a_request_says_how_it_samples_over_what_the_target_does() -> None:
    sampled = LoadRequest([1, 2, 3], 5, sampling={"temperature": 0.7, "top_p": 0.95, "seed": 9})
    _, server = measure(five_tokens, [sampled, *ask(0)], concurrency=1)
    names = ("temperature", "top_p", "seed", "ignore_eos")
    said = [tuple(seen.body.get(name) for name in names) for seen in server.seen]
    assert said == [(0.7, 0.95, 9, True), (0, None, None, True)]


async def five_tokens(stream: Stream) -> None:
    """First content at 0.5 s, then gaps of 0.1, 0.2 and 0.3 s: four chunks that hold five tokens."""
    await stream.head()
    for at, text in ((0.5, "a"), (0.6, "b"), (0.8, "cd")):
        await stream.until(at)
        await stream.text(text)
    await stream.until(1.1)
    await stream.text("e", "length")
    await stream.end(prompt=3, completion=5, cached=2)


def test_one_request_has_exactly_the_scripts_times() -> None:
    result, _ = measure(five_tokens, ask(0), concurrency=1)
    (sample,) = result.requests
    assert sample.ok and sample.ttft_s == approx(0.5) and sample.e2el_s == approx(1.1)
    assert sample.itl_s == approx((0.1, 0.2, 0.3)), "TTFT is no inter-token latency"
    assert (sample.isl, sample.osl, sample.cached_tokens) == (3, 5, 2), (
        "five tokens by usage, although four chunks came"
    )
    assert sample.tpot_s == approx(0.6 / 4)
    assert (result.duration_s, result.output_tput, result.input_tput, result.total_tput) == approx(
        (1.1, 5 / 1.1, 3 / 1.1, 8 / 1.1)
    )


def test_the_body_asks_for_equal_work_and_for_usage() -> None:
    _, server = measure(five_tokens, ask(0), concurrency=1)
    assert server.seen[0].path == "/v1/completions"
    assert server.seen[0].body == {
        "model": "demo", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_chunk_with_a_role_only_is_not_the_first_token() -> None:
    async def chat(stream: Stream) -> None:
        await stream.head()
        await stream.event(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        )
        await stream.until(0.7)
        await stream.event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]})
        await stream.until(0.9)
        await stream.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await stream.until(5.0)
        await stream.end(prompt=9, completion=3)

    result, server = measure(chat, [LoadRequest("hello", 8)], concurrency=1, style="chat", extra={})
    (sample,) = result.requests
    assert (sample.ttft_s, sample.e2el_s) == approx((0.7, 0.9)) and sample.itl_s == ()
    assert server.seen[0].path == "/v1/chat/completions"
    assert server.seen[0].body["messages"] == [{"role": "user", "content": "hello"}]
    assert "temperature" not in server.seen[0].body


def test_latency_counts_from_the_intended_time_when_the_server_stalls() -> None:
    gate = asyncio.Semaphore(1)

    async def one_at_a_time(stream: Stream) -> None:
        async with gate:  # a request takes 1 s, and others wait for it
            await stream.head()
            await stream.until(asyncio.get_running_loop().time() - stream.start + 1.0)
            await stream.text("x", "length")
        await stream.end(prompt=3, completion=1)

    result, server = measure(one_at_a_time, ask(0.0, 0.1, 0.2))
    assert [s.at for s in server.seen] == approx([0.0, 0.1, 0.2]), "the second was not held back by the first"
    assert [s.ttft_s for s in result.requests] == approx([1.0, 1.9, 2.8])
    assert result.duration_s == approx(3.0) and result.concurrency == 0


def test_a_late_send_does_not_shorten_a_latency() -> None:
    async def blocks_the_loop(stream: Stream) -> None:
        await stream.head()
        if stream.seen.body["prompt"] == "stall":
            loop = asyncio.get_running_loop()
            loop._jumping.now += 2.0  # type: ignore[attr-defined]  # the client's own process was stopped for 2 s
        await stream.text("x", "length")
        await stream.end(prompt=3, completion=1)

    requests = [LoadRequest("stall", 1, 0.0), LoadRequest("next", 1, 0.5)]
    result, _ = measure(blocks_the_loop, requests)
    late = result.requests[1]
    assert late.intended_s == 0.5 and late.sent_s == approx(2.0) and late.ttft_s == approx(1.5)


def test_a_closed_loop_keeps_so_many_users_busy_and_no_more() -> None:
    async def takes_its_budget(stream: Stream) -> None:
        await stream.head()
        await stream.until(stream.seen.body["max_tokens"] / 10)
        await stream.text("x", "length")
        await stream.end(prompt=1, completion=stream.seen.body["max_tokens"])

    requests = [LoadRequest([1], n) for n in (10, 20, 5, 5)]
    result, server = measure(takes_its_budget, requests, concurrency=2)
    assert [s.at for s in server.seen] == approx([0.0, 0.0, 1.0, 1.5])
    assert [r.intended_s for r in result.requests] == approx([0.0, 0.0, 1.0, 1.5])
    assert result.duration_s == approx(2.0) and result.output_tput == approx(40 / 2.0)
    assert server.connections == 2, "connections are kept"


def test_warm_up_requests_are_sent_first_and_count_for_nothing() -> None:
    warm = [LoadRequest([9], 1), LoadRequest([8], 1), LoadRequest([7], 1)]
    result, server = measure(five_tokens, ask(0, 0), concurrency=2, warmup=warm)
    assert [s.body["prompt"] for s in server.seen] == [[9], [8], [7], [1, 2, 3], [1, 2, 3]]
    assert len(result.requests) == 2 and result.duration_s == approx(1.1)
    assert [s.at for s in server.seen] == approx([0, 0, 1.1, 2.2, 2.2])


def test_events_cut_anywhere_and_joined_are_still_read() -> None:
    async def cut(stream: Stream) -> None:
        await stream.head()
        payload = 'data: {"choices": [{"text": "é", "finish_reason": null}]}\r\n\r\n: a comment\n\n'.encode()
        for i in range(len(payload)):
            await stream.raw(payload[i : i + 1])
        await stream.until(1.0)
        both = b'data: {"choices": [{"text": "b"}]}\n\ndata: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
        await stream.raw(both)
        await stream.end(prompt=1, completion=2)

    (sample,) = measure(cut, ask(0), concurrency=1)[0].requests
    assert sample.ok and sample.itl_s == approx((1.0,)) and sample.finish_reason == "stop"


def test_without_a_usage_field_tokens_are_counted_by_a_tokenizer_or_not_at_all() -> None:
    async def no_usage(stream: Stream) -> None:
        await stream.head()
        await stream.text("one two ")
        await stream.text("three", "stop")
        await stream.end()

    (counted,) = measure(no_usage, ask(0), concurrency=1, count_tokens=lambda text: len(text.split()))[0].requests
    assert counted.ok and counted.osl == 3
    result = measure(no_usage, ask(0), concurrency=1)[0]
    assert "no usage field" in result.requests[0].error and result.output_tput == 0.0


async def refuse(stream: Stream) -> None:
    body = b'{"error": {"message": "bad key sk-secret", "type": "auth"}}'
    stream.writer.write(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


async def broken_off(stream: Stream) -> None:
    await stream.head()
    await stream.text("x")
    stream.writer.close()


async def no_finish(stream: Stream) -> None:
    await stream.head()
    await stream.text("x")
    await stream.end(prompt=1, completion=1)


async def error_event(stream: Stream) -> None:
    await stream.head()
    await stream.text("x")
    await stream.event({"error": {"message": "the engine stopped"}})
    await stream.end(prompt=1, completion=1)


async def not_json(stream: Stream) -> None:
    await stream.head()
    await stream.event(b"{oops")
    await stream.end()


async def too_slow(stream: Stream) -> None:
    await stream.head()
    await stream.until(100)
    await stream.text("x", "stop")
    await stream.end(prompt=1, completion=1)


async def not_http(stream: Stream) -> None:
    stream.writer.write(b"220 mail.example ESMTP\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        (refuse, 401, "bad key <api key>"),
        (broken_off, 200, "closed the connection in mid-answer"),
        (no_finish, 200, "without a finish reason"),
        (error_event, 200, "the engine stopped"),
        (not_json, 200, "not JSON"),
        (too_slow, 200, "no whole answer within 30 s"),
        (not_http, 0, "not HTTP/1.1"),
    ],
)
def test_a_failed_request_is_kept_with_its_reason_and_counts_for_no_throughput(script, status, error) -> None:
    async def second_fails(stream: Stream) -> None:
        await (script if stream.seen.body["max_tokens"] == 9 else five_tokens)(stream)

    requests = [*ask(0), LoadRequest([1], 9)]
    result, _ = measure(second_fails, requests, concurrency=1, api_key="sk-secret", timeout_s=30)
    good, bad = result.requests
    assert good.ok and not bad.ok and bad.status == status and error in bad.error
    assert (len(result.done), len(result.failed)) == (1, 1) and result.summary()["failed"] == 1
    assert result.output_tput == approx(5 / result.duration_s) and result.duration_s >= 1.1


def test_a_server_that_is_not_there_is_a_clear_error_and_a_failed_warm_up_stops() -> None:
    async def main() -> None:
        target = Target("http://127.0.0.1:1", "demo")
        result = await closed_loop(target, ask(0), 1)
        assert "http://127.0.0.1:1 cannot be reached" in result.requests[0].error and result.requests[0].status == 0
        with pytest.raises(HttpError, match=r"A warm-up request failed: http:.* cannot be reached"):
            await closed_loop(target, ask(0), 1, ask(0))

    asyncio.run(main())


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async def closes_after(stream: Stream) -> None:
        await five_tokens(stream)
        stream.writer.close()

    result, server = measure(closes_after, ask(0, 0, 0), concurrency=1)
    assert all(r.ok for r in result.requests) and server.connections == 3


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://", "http://x:port", "http://me:pass@x"])
def test_an_address_that_is_none_is_refused(url) -> None:
    with pytest.raises(HttpError):
        Target(url, "demo")


def test_the_key_goes_out_as_a_bearer_token_and_into_no_text() -> None:
    target = Target("http://h/v1/", "demo", api_key="sk-secret", headers={"x-team": "hidden"})
    assert "sk-secret" not in repr(target) and "hidden" not in repr(target) and "sk-secret" not in repr(target.client())
    _, server = measure(five_tokens, ask(0), concurrency=1, api_key="sk-secret")
    assert server.seen[0].headers["authorization"] == "Bearer sk-secret"
    assert (target.address().host, target.address().port, target.address().path) == ("h", 80, "")
    with pytest.raises(HttpError, match="line break") as caught:
        measure(five_tokens, ask(0), concurrency=1, warmup=ask(0), api_key="a\r\nb")
    assert "a\r\nb" not in str(caught.value)


def test_a_summary_has_inferencex_names_and_goodput_counts_requests_within_limits() -> None:
    result, _ = measure(five_tokens, ask(0.0, 1.0))
    summary = result.summary(Slo(ttft_s=0.5001, tpot_s=0.2), devices=2)
    assert summary["output_tput_per_gpu"] == approx(10 / 2.1 / 2) and summary["tput_per_gpu"] == approx(16 / 2.1 / 2)
    assert summary["median_ttft"] == approx(0.5) and summary["p99_e2el"] == approx(1.1)
    assert (
        summary["mean_itl"] == approx(0.2)
        and summary["median_itl"] == approx(0.2)
        and summary["mean_tpot"] == approx(0.15)
    )
    assert summary["median_intvty"] == approx(1 / 0.15) and (summary["isl"], summary["osl"]) == (3, 5)
    assert summary["goodput"] == approx(2 / 2.1) and result.goodput(Slo(ttft_s=0.4)) == 0 == result.goodput(
        Slo(tpot_s=0.1)
    )
    assert summary["cached_tokens"] == 4 and summary["request_tput"] == approx(2 / 2.1)


def test_joined_windows_add_their_time_and_keep_every_sample() -> None:
    one, _ = measure(five_tokens, ask(0), concurrency=1)
    both = join([one, one])
    assert both.duration_s == approx(2.2) and len(both.requests) == 2 and both.output_tput == approx(one.output_tput)
    with pytest.raises(ValueError):
        join([])


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    async def single(stream: Stream) -> None:
        await stream.head()
        await stream.text("x", "length")
        await stream.end(prompt=1, completion=1)

    result, _ = measure(single, ask(0), concurrency=1)
    assert (
        result.requests[0].tpot_s is None
        and result.summary()["mean_tpot"] is None
        and result.summary()["p99_itl"] is None
    )
    assert result.requests[0].brief()["tpot_s"] is None
