"""Reading request bodies: what is taken, and which field is named when something is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.api_requests import ApiError, check_ids, read_chat, read_completion, read_json
from engine.models.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_prompts_may_be_text_ids_or_lists_of_either(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    for prompt, expected in (
        ("the fox", [ids]),
        (ids, [ids]),
        (["the fox", "dog"], [ids, tokenizer.encode("dog")]),
        ([ids, [5, 6]], [ids, [5, 6]]),
    ):
        ask = read_completion({"prompt": prompt}, tokenizer)
        assert ask.prompts == expected and (ask.max_tokens, ask.n, ask.stream) == (16, 1, False)


def test_a_conversation_goes_through_the_models_template(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    ask = read_chat({"messages": messages}, tokenizer)
    assert ask.prompt_texts[0] == (
        "<|start|>system\nbe brief<|end|>\n<|start|>user\nhello<|end|>\n"
        "<|start|>assistant\n<|end|>\n<|start|>assistant\n"
    )
    assert ask.max_tokens is None


def test_max_completion_tokens_comes_before_max_tokens(tokenizer: Tokenizer) -> None:
    assert read_chat({"messages": HELLO, "max_completion_tokens": 3, "max_tokens": 9}, tokenizer).max_tokens == 3
    assert read_chat({"messages": HELLO, "max_tokens": 9}, tokenizer).max_tokens == 9


def test_sampling_fields_arrive(tokenizer: Tokenizer) -> None:
    body = {
        "prompt": "a",
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -5,
        "logit_bias": {"3": 4},
        "stop_token_ids": [9],
        "presence_penalty": 1,
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 0,
        "stop": "x",
    }
    ask = read_completion(body, tokenizer)
    s = ask.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0, 0.5, 7, 0.1, -5)
    assert (s.logit_bias, s.stop_token_ids, s.presence_penalty) == ({3: 4.0}, (9,), 1)
    assert s.ignore_eos and s.min_tokens == 2 and s.logprobs == 0 and ask.stop == ["x"]


def test_without_a_seed_each_request_draws_its_own(tokenizer: Tokenizer) -> None:
    seeds = {read_completion({"prompt": "a"}, tokenizer).sampling.seed for _ in range(5)}
    assert len(seeds) == 5


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_a_completion_with_a_fault_names_the_field(tokenizer: Tokenizer, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_ids(read_completion({"prompt": "a", **changes}, tokenizer).sampling, tokenizer.vocab_size)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": -1}, "max_tokens"),
    ],
)
def test_a_conversation_with_a_fault_names_the_field(tokenizer: Tokenizer, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": HELLO, **changes}, tokenizer)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"a"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_json(raw)
    assert caught.value.status == 400
