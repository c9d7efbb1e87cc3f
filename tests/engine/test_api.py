"""The API server over HTTP: statuses, streams, counts, and what happens when a client leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.api_generate import Generation
from engine.api_requests import read_completion
from engine.artifacts import Artifact
from engine.models.tokenizer import Tokenizer
from engine.sequence import TokenEvent
from tests.paths import ROOT
from tests.serving import Server

FOX = "the quick brown fox"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


def completion(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**GREEDY, "prompt": FOX, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with the end mark."""
    with http.stream("POST", path, json={**GREEDY, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"polymorph_{name} ")))


def test_an_answer_names_its_version_and_counts_its_tokens(http: httpx.Client, baseline: Artifact) -> None:
    response = http.post("/v1/completions", json={**GREEDY, "prompt": [5, 6, 7]})
    assert response.headers["x-polymorph-version"] == "baseline"
    assert response.headers["x-polymorph-artifact"] == baseline.hash
    body = response.json()
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": None,
    }


def test_text_and_its_token_ids_are_the_same_prompt(http: httpx.Client, tiny_model: Path) -> None:
    entry = http.get("/v1/models").json()["data"][0]
    assert entry["id"] == "tiny" and http.get("/v1/models/tiny").json()["id"] == "tiny"
    tokenizer = Tokenizer(tiny_model)
    by_text, by_ids = completion(http), completion(http, prompt=tokenizer.encode(FOX))
    assert by_text["choices"] == by_ids["choices"] and by_text["usage"]["prompt_tokens"] == len(tokenizer.encode(FOX))
    both = completion(http, prompt=[FOX, "dog"])
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert both["choices"][0]["text"] == by_text["choices"][0]["text"]


async def test_tokens_that_come_together_are_one_part_with_its_end(tiny_model: Path) -> None:
    """A client that reads slowly must not see the finish reason on every chunk that was waiting."""
    tokenizer, submitted = Tokenizer(tiny_model), []
    runner = SimpleNamespace(limit=64, check=lambda request: None, submit=lambda *given: submitted.append(given))
    body = {"model": "tiny", "prompt": FOX, "max_tokens": 3}
    generation = Generation(read_completion(body, tokenizer), runner, tokenizer, iter([7]))  # type: ignore[arg-type]
    _, queue = submitted[0]
    for token, reason in ((40, None), (41, None), (42, "length")):
        queue.put_nowait(TokenEvent(7, token, "a" * 64, finish_reason=reason))
    ((choice, text),) = await generation.parts()
    assert text == tokenizer.decode([40, 41, 42]) and choice.finish_reason == "length" and generation.done


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    whole = completion(http, max_tokens=20, logprobs=2)
    options = {"include_usage": True}
    chunks = events(http, "/v1/completions", prompt=FOX, max_tokens=20, logprobs=2, stream_options=options)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
    assert all(c["usage"] is None for c in chunks[:-1]) and chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    streamed: dict[str, list[Any]] = {}
    for chunk in chunks[:-1]:
        for name, values in chunk["choices"][0]["logprobs"].items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == whole["choices"][0]["logprobs"]
    assert all(len(top) == 2 for top in streamed["top_logprobs"])


def test_without_being_asked_a_stream_holds_no_usage(http: httpx.Client) -> None:
    assert all("usage" not in chunk for chunk in events(http, "/v1/completions", prompt=FOX))


def test_a_chat_stream_opens_with_the_role_and_its_first_content_together(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with http.stream(
        "POST",
        "/v1/chat/completions",
        json={**GREEDY, "messages": messages, "stream": True, "logit_bias": {"40": 100}},
    ) as response:
        first = next(response.iter_bytes())
    deltas = [json.loads(e[6:])["choices"][0]["delta"] for e in first.decode().split("\n\n") if e]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1]["content"]
    chunks = events(http, "/v1/chat/completions", messages=messages)
    whole = http.post("/v1/chat/completions", json={**GREEDY, "messages": messages}).json()
    assert whole["choices"][0]["message"]["role"] == "assistant"
    content = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert content == whole["choices"][0]["message"]["content"]


def test_a_stream_of_split_characters_joins_to_the_whole_answer(http: httpx.Client) -> None:
    warm = {"prompt": "🎉" * 20, "temperature": 1.5, "seed": 3, "max_tokens": 100}
    whole = completion(http, **warm, logprobs=0)
    chunks = events(http, "/v1/completions", **warm)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    tokens = whole["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == 100 > len(chunks), "some tokens are part of a character"
    assert any(token.startswith("bytes:") for token in tokens)


def test_echo_puts_the_prompt_first(http: httpx.Client) -> None:
    plain = completion(http)["choices"][0]["text"]
    assert completion(http, echo=True)["choices"][0]["text"] == FOX + plain
    chunks = events(http, "/v1/completions", prompt=FOX, echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == FOX + plain


def test_a_stop_string_ends_the_answer_and_is_not_in_it(http: httpx.Client) -> None:
    forced = {"40": 100}
    letter = completion(http, logit_bias=forced, max_tokens=6)["choices"][0]["text"][0]
    body = completion(http, logit_bias=forced, stop=letter * 3, max_tokens=60)
    assert body["choices"][0]["text"] == "" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3
    late = completion(http, logit_bias=forced, stop=letter * 3, max_tokens=60, min_tokens=10)
    assert late["usage"]["completion_tokens"] == 10 and late["choices"][0]["text"] == letter * 7


def test_the_end_token_ends_the_answer_unless_told_otherwise(http: httpx.Client) -> None:
    end = {"logit_bias": {"2": 100}, "ignore_eos": False}
    stopped = completion(http, **end)
    assert stopped["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": None,
        "text": "",
    }
    assert stopped["usage"]["completion_tokens"] == 1
    assert completion(http, **end, min_tokens=4)["usage"]["completion_tokens"] == 5
    assert completion(http, logit_bias={"2": 100})["choices"][0]["finish_reason"] == "length"


def test_choices_of_one_seed_differ_and_repeat(http: httpx.Client) -> None:
    warm = {"temperature": 1.5, "seed": 11, "n": 3, "max_tokens": 12}
    first, second = completion(http, **warm), completion(http, **warm)
    texts = [c["text"] for c in first["choices"]]
    assert texts == [c["text"] for c in second["choices"]] and len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 36
    chunks = events(http, "/v1/completions", prompt=FOX, **warm)
    for i in range(3):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) == texts[i]


def test_a_frequency_penalty_spreads_what_is_chosen(http: httpx.Client) -> None:
    two = {"logit_bias": {"40": 100, "41": 100}, "max_tokens": 40}
    plain = completion(http, **two)["choices"][0]["text"]
    spread = completion(http, **two, frequency_penalty=2)["choices"][0]["text"]
    letters = set(spread)
    assert len(letters) == 2 and len(spread) == 40
    assert min(spread.count(c) for c in letters) > min(plain.count(c) for c in letters)


def test_a_repeated_prompt_is_counted_as_cached(http: httpx.Client) -> None:
    prompt = [(i * 13) % 400 + 5 for i in range(50)]
    first, second = (completion(http, prompt=prompt)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", {"prompt": [5] * 512}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": FOX, "max_tokens": -1}, 400, "max_tokens", None),
        ("/v1/completions", {"prompt": [512]}, 400, "prompt", None),
        ("/v1/completions", {"prompt": FOX, "model": "gpt"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role", None),
        ("/v1/chat/completions", {"prompt": FOX}, 400, "messages", None),
        ("/v1/nonsense", {}, 404, None, None),
    ],
)
def test_errors_have_openais_shape(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    response = http.post(path, json={**GREEDY, **body})
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code) and error["message"]
    assert error["type"] == "invalid_request_error"


def test_broken_json_wrong_methods_and_huge_bodies_are_told_apart(http: httpx.Client) -> None:
    for content, status in ((b'{"model": "tiny"', 400), (b"x" * (17 << 20), 413)):
        response = http.post("/v1/completions", content=content)
        assert response.status_code == status and response.json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/v1/models/none").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(http: httpx.Client, api: Server, stream: bool) -> None:
    body = {**GREEDY, "prompt": [9] * 20, "max_tokens": 480, "stream": stream}
    generated = metric(http, "generated_tokens_total")
    with httpx.Client(base_url=api.url) as leaver:
        if stream:
            with leaver.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaver.post("/v1/completions", json=body, timeout=0.1)
    while metric(http, "running") + metric(http, "waiting"):
        pass
    assert metric(http, "generated_tokens_total") - generated < 480
    assert metric(http, "kv_blocks_free") == metric(http, "kv_blocks")
    assert len(completion(http)["choices"]) == 1


def test_metrics_count_requests_and_tokens(http: httpx.Client) -> None:
    before = metric(http, "generated_tokens_total"), metric(http, 'requests_total{status="200"}')
    completion(http, max_tokens=5)
    after = metric(http, "generated_tokens_total"), metric(http, 'requests_total{status="200"}')
    assert (after[0] - before[0], after[1] - before[1]) == (5, 1)
    assert metric(http, "ttft_seconds_count") > 0


def test_a_port_in_use_is_a_sentence_and_not_a_trace(api: Server, tiny_model: Path, baseline: Artifact) -> None:
    port = api.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "engine.api", "--model", str(tiny_model), "--name", "tiny"]
    command += ["--artifact", str(baseline.path), "--port", port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"127.0.0.1:{port} cannot be listened on" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"--model": "/nowhere"}, "/nowhere"),
        ({"--artifact": "/nowhere"}, "no artefact"),
    ],
)
def test_a_wrong_path_is_a_sentence_and_not_a_trace(
    baseline: Artifact, tiny_model: Path, change: dict[str, str], named: str
) -> None:
    values = {"--model": str(tiny_model), "--name": "tiny", "--artifact": str(baseline.path), "--port": "0"} | change
    command = [sys.executable, "-m", "engine.api", *(part for pair in values.items() for part in pair)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and named in done.stderr and "Traceback" not in done.stderr
