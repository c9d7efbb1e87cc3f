"""The official client against the server: what customers' programs do."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serving import Server

FORCED = {"40": 100}


@pytest.fixture
def client(api: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "polymorph"


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the fox", max_tokens=5, temperature=0, logprobs=3)
    assert answer.usage is not None and answer.usage.completion_tokens <= 5
    choice = answer.choices[0]
    assert choice.finish_reason in ("length", "stop") and choice.logprobs is not None
    assert choice.logprobs.token_logprobs and all(p is None or p <= 0 for p in choice.logprobs.token_logprobs)
    assert choice.logprobs.top_logprobs is not None and len(choice.logprobs.top_logprobs[0]) == 3


def test_a_conversation_with_logprobs_and_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        max_completion_tokens=6,
        n=2,
        seed=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True, "min_tokens": 3},
    )
    assert len(answer.choices) == 2 and answer.usage is not None and answer.usage.completion_tokens == 12
    for choice in answer.choices:
        assert choice.message.role == "assistant" and choice.finish_reason == "length"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 2 and entry.bytes is not None
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_a_streamed_conversation(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        logit_bias=FORCED,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert len(text) == 5 and len(set(text)) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    assert not chunks[-1].choices


def test_a_streamed_completion_and_its_version(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=[4, 5, 6], max_tokens=4, logit_bias=FORCED, stream=True
    )
    assert raw.headers["x-polymorph-version"] == "baseline"
    assert len("".join(chunk.choices[0].text for chunk in raw.parse())) == 4


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1") as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="wizard"):
        client.chat.completions.create(model="tiny", messages=[{"role": "wizard", "content": "a"}])  # type: ignore[list-item,misc]
