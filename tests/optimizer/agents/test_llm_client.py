"""Asking a language model over HTTP: every fault of a real server, what it costs, and a wish to stop that is heard at once."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import ArtifactStore
from optimizer.agents.llm.client import TRIES, Client, Message
from optimizer.agents.llm.faults import Fault, Stopped, retry_after
from optimizer.agents.llm.purse import CapReached, Purse, Tokens
from optimizer.agents.llm.settings import LlmSettings
from tests.optimizer.agents.llm_server import KEY, Fails, Hangs, Says, Scripted, Sends, llm_server
from tests.serving import serve

HELLO: list[Message] = [{"role": "user", "content": "hello"}]
SETTINGS = LlmSettings(
    "scripted-1", key=KEY, usd_input=2.0, usd_cached=0.5, usd_output=10.0, answer_tokens=1024, timeout_s=5
)


def client(server: Scripted, stopped: Any = lambda: False, **changes: Any) -> Client:
    settings = replace(SETTINGS, base_url=server.url, **changes)
    return Client("llm-1", settings, Purse(settings), stopped, pause_s=0.01)


def test_an_answer_is_read_and_paid_for() -> None:
    with llm_server(Says("hi there", usage=(1000, 200, 600))) as server:
        asking = client(server)
        assert asking.ask(HELLO).text == "hi there"
        assert server.asked[0]["model"] == "scripted-1" and server.asked[0]["messages"] == HELLO
        assert server.keys == [f"Bearer {KEY}"]
    used = asking.purse.of("llm-1")
    assert (used.calls, used.input_tokens, used.output_tokens, used.cached_tokens) == (1, 1000, 200, 600)
    assert used.usd == pytest.approx((400 * 2.0 + 600 * 0.5 + 200 * 10.0) / 1e6)
    assert used.failures == {} and used.reserved is None


def test_a_server_that_does_not_count_is_counted_for() -> None:
    with llm_server(Says("x" * 300, usage=None)) as server:
        asking = client(server)
        asking.ask(HELLO)
    used = asking.purse.of("llm-1")
    assert used.output_tokens == 100 and used.input_tokens > 0 and used.estimated_calls == 1


@pytest.mark.parametrize(
    ("fault", "kind", "mend"),
    [
        (
            Fails(401, f"Incorrect API key provided: {KEY}"),
            "key",
            "Put a key of that server into POLYMORPH_LLM_API_KEY",
        ),
        (Fails(403, "no access"), "key", "POLYMORPH_LLM_API_KEY"),
        (Fails(404, "no such model"), "model", "Look at POLYMORPH_LLM_MODEL and POLYMORPH_LLM_BASE_URL"),
        (Fails(402, "pay first"), "quota", "account is used up"),
        (Fails(429, "You exceeded your current quota", "insufficient_quota"), "quota", "account is used up"),
        (Fails(400, f"bad field, says {KEY}"), "request", "status 400"),
    ],
)
def test_what_no_patience_mends_is_said_once_and_without_the_key(fault: Fails, kind: str, mend: str) -> None:
    with llm_server(fault) as server:
        asking = client(server)
        with pytest.raises(Fault) as caught:
            asking.ask(HELLO)
        assert len(server.asked) == 1
    assert caught.value.final and caught.value.kind == kind
    assert mend in str(caught.value) and KEY not in str(caught.value)
    used = asking.purse.of("llm-1")
    assert used.failures == {kind: 1} and used.calls == 0 and used.usd == 0.0


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ((Fails(500), Fails(503)), "server"),
        ((Fails(429, headers=(("retry-after", "0.05"),)), Fails(429)), "rate_limit"),
        ((Sends("<html>busy</html>", "text/html"), Sends("{}")), "response"),
        ((Sends('{"choices": ['),), "response"),
        ((Sends('{"choices": []}'), Sends("null"), Sends('{"choices": [{"index": 0}]}')), "response"),
    ],
)
def test_what_passes_is_waited_for(faults: tuple[Any, ...], kind: str) -> None:
    with llm_server(*faults, Says("back")) as server:
        asking = client(server)
        assert asking.ask(HELLO).text == "back"
    assert asking.purse.of("llm-1").failures == {kind: len(faults)}


def test_patience_has_an_end() -> None:
    with llm_server(Fails(500)) as server:
        with pytest.raises(Fault) as caught:
            client(server).ask(HELLO)
        assert len(server.asked) == TRIES
    assert caught.value.kind == "server" and not caught.value.final


def test_a_server_that_is_not_there() -> None:
    with llm_server(Says("never")) as server:
        gone = client(server)
    with pytest.raises(Fault) as caught:
        gone.ask(HELLO)
    assert caught.value.kind == "connection" and "Look at POLYMORPH_LLM_BASE_URL" in str(caught.value)


def test_silence_is_a_time_out_and_counts_what_was_sent() -> None:
    with llm_server(Hangs(), Says("late")) as server:
        asking = client(server, timeout_s=1.0)
        assert asking.ask(HELLO).text == "late"
    used = asking.purse.of("llm-1")
    assert used.failures == {"timeout": 1} and used.calls == 2 and used.estimated_calls == 1


@pytest.mark.parametrize(
    "answer",
    [
        Says(None, refusal="I cannot help with that."),
        Says("half", finish="content_filter"),
        Says(""),
        Says(None),
        Says("  \n", finish="length"),
    ],
)
def test_a_refusal_or_silence_is_no_answer_and_is_paid_for(answer: Says) -> None:
    with llm_server(answer) as server:
        asking = client(server)
        with pytest.raises(Fault) as caught:
            asking.ask(HELLO)
        assert len(server.asked) == 1, "asking the same again gives the same"
    assert caught.value.kind in ("refusal", "empty") and not caught.value.final
    assert asking.purse.of("llm-1").calls == 1 and asking.purse.of("llm-1").failures == {caught.value.kind: 1}


def test_an_answer_that_was_cut_is_known_as_such() -> None:
    with llm_server(Says("half of", finish="length")) as server:
        assert client(server).ask(HELLO).cut


def test_a_context_that_is_too_long_is_told_apart() -> None:
    with (
        llm_server(
            Fails(400, "This model's maximum context length is 4096 tokens.", "context_length_exceeded")
        ) as server,
        pytest.raises(Fault) as caught,
    ):
        client(server).ask(HELLO)
    assert (
        caught.value.kind == "context"
        and not caught.value.final
        and "POLYMORPH_LLM_CONTEXT_TOKENS" in str(caught.value)
    )


def test_the_newer_name_of_the_limit_is_found_once() -> None:
    refused = Fails(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with llm_server(refused, Says("first"), Says("second")) as server:
        asking = client(server)
        assert [asking.ask(HELLO).text, asking.ask(HELLO).text] == ["first", "second"]
        assert ["max_completion_tokens" in body for body in server.asked] == [False, True, True]


@pytest.mark.parametrize("fault", [Hangs(60), Fails(429, headers=(("retry-after", "60"),))])
def test_a_wish_to_stop_is_heard_while_it_waits(fault: Any) -> None:
    stop = threading.Event()
    with llm_server(fault) as server:
        asking = client(server, stop.is_set, timeout_s=50)
        threading.Timer(0.3, stop.set).start()
        start = time.monotonic()
        with pytest.raises(Stopped):
            asking.ask(HELLO)
        assert time.monotonic() - start < 20, "it would have waited a minute"
    assert asking.purse.of("llm-1").reserved is None


def test_the_cap_in_money_holds_before_the_call() -> None:
    with llm_server(Says("one", usage=(1000, 1000, 0))) as server:
        asking = client(server, max_usd=0.025)  # a call: 0.012, and up to 0.0103 set aside for the next
        asking.ask(HELLO)
        asking.ask(HELLO)
        with pytest.raises(CapReached, match=r"\$0.02 of \$0.0[23]"):
            asking.ask(HELLO)
        assert len(server.asked) == 2
    assert asking.purse.spent()[0] <= 0.025


def test_the_cap_in_tokens_holds_without_prices_and_over_agents() -> None:
    settings = replace(SETTINGS, usd_input=None, usd_cached=None, usd_output=None, max_tokens=4000)
    with llm_server(Says("one", usage=(1000, 1000, 0))) as server:
        settings = replace(settings, base_url=server.url)
        purse = Purse(settings)
        first, second = (Client(f"llm-{n}", settings, purse, lambda: False) for n in (1, 2))
        first.ask(HELLO)
        with pytest.raises(CapReached, match="4,000 of 4,000 tokens"):
            for _ in range(3):
                second.ask(HELLO)
    assert purse.of("llm-1").usd is None and purse.spent() == (0.0, 4000)


def test_a_call_cut_off_by_a_kill_counts_as_spent() -> None:
    told: list[dict[str, Any]] = []
    purse = Purse(SETTINGS, told.append)
    purse.reserve("llm-1", 500, 1024)
    later = Purse(SETTINGS)
    later.restore({"llm-1": told[-1]})  # nothing was told after the reservation
    used = later.of("llm-1")
    assert (used.input_tokens, used.output_tokens, used.failures) == (500, 1024, {"interrupted": 1})
    assert used.usd == pytest.approx((500 * 2 + 1024 * 10) / 1e6)


def test_totals_go_on_over_attempts() -> None:
    told: list[dict[str, Any]] = []
    purse = Purse(SETTINGS, told.append)
    purse.reserve("llm-1", 10, 10)
    purse.settle("llm-1", Tokens(1000, 100), "malformed")
    later = Purse(SETTINGS)
    later.restore({row["agent"]: row for row in told})
    assert later.of("llm-1") == purse.of("llm-1") and later.spent() == purse.spent()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("9999", 300.0),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 60.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(text: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": text}, now=0.0) == seconds


def test_the_engines_own_server_is_one_of_them(tiny_model: Path, tmp_path: Path) -> None:
    artifact = ArtifactStore(tmp_path).baseline()
    options = ["--model", str(tiny_model), "--name", "tiny", "--artifact", str(artifact.path), "--dtype", "float32"]
    with serve("engine.api", [*options, "--threads", "1"], tmp_path / "api.log") as server:
        settings = replace(SETTINGS, model="tiny", base_url=f"{server.url}/v1", answer_tokens=16, timeout_s=60)
        asking = Client("llm-1", settings, Purse(settings), lambda: False, pause_s=0.01)
        asking.ask(HELLO)
        used = asking.purse.of("llm-1")
        assert used.output_tokens <= 16 and used.input_tokens > 0 and not used.estimated_calls
        with pytest.raises(Fault) as caught:
            asking.ask([{"role": "user", "content": "the quick brown fox " * 500}])
    assert caught.value.kind == "context"
