"""Reading OpenAI-shaped request bodies. Every fault becomes an `ApiError` with the right status and field."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.tokenizer import ChatError, Tokenizer
from engine.sequence import InvalidRequest, SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES = 128
MAX_STOPS = 16
INT64 = range(-(1 << 63), 1 << 63)


class ApiError(Exception):
    """An error in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def read_json(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    return body


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request, read and checked. `prompts` holds token ids; each yields `n` choices."""

    chat: bool
    prompts: list[list[int]]
    prompt_texts: list[str]
    n: int
    max_tokens: int | None
    sampling: SamplingParams
    stop: list[str]
    stream: bool
    include_usage: bool
    logprobs: int  # alternatives; -1 none
    echo: bool
    include_stop: bool


def read_completion(body: dict[str, Any], tokenizer: Tokenizer) -> Ask:
    if body.get("suffix"):
        raise bad("suffix is not supported; leave it out", "suffix", "unsupported_parameter")
    prompts, texts = _prompts(body.get("prompt"), tokenizer)
    wanted = field(body, "logprobs", int, None)
    if wanted is not None and not 0 <= wanted <= 20:
        raise bad(f"logprobs must lie between 0 and 20, not {wanted}", "logprobs")
    echo = bool(field(body, "echo", bool, False))
    if echo and wanted is not None:
        raise bad("echo together with logprobs is not supported; leave one out", "echo", "unsupported_parameter")
    best_of, n = field(body, "best_of", int, None), field(body, "n", int, 1)
    if best_of is not None and best_of != n:
        raise bad("best_of other than n is not supported; leave it out", "best_of", "unsupported_parameter")
    return _ask(body, False, prompts, texts, field(body, "max_tokens", int, 16), -1 if wanted is None else wanted, echo)


def read_chat(body: dict[str, Any], tokenizer: Tokenizer) -> Ask:
    for name in ("tools", "functions", "audio"):
        if body.get(name):
            raise bad(f"{name} is not supported; leave it out", name, "unsupported_parameter")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise bad("only the response_format of type text is supported", "response_format", "unsupported_parameter")
    messages = [_message(m, i) for i, m in enumerate(_list(body.get("messages"), "messages"))]
    try:
        text = tokenizer.chat(messages)
    except ChatError as error:
        raise bad(str(error), "messages") from error
    limit = field(body, "max_completion_tokens", int, None)
    limit = field(body, "max_tokens", int, None) if limit is None else limit
    top = field(body, "top_logprobs", int, 0)
    if not 0 <= top <= 20:
        raise bad(f"top_logprobs must lie between 0 and 20, not {top}", "top_logprobs")
    wants = bool(field(body, "logprobs", bool, False))
    if top and not wants:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
    return _ask(body, True, [_encoded(tokenizer, text, "messages")], [text], limit, top if wants else -1, False)


def _ask(
    body: dict[str, Any],
    chat: bool,
    prompts: list[list[int]],
    texts: list[str],
    max_tokens: int | None,
    logprobs: int,
    echo: bool,
) -> Ask:
    n = field(body, "n", int, 1)
    if n < 1 or n * len(prompts) > MAX_CHOICES:
        raise bad(f"n times the number of prompts must lie between 1 and {MAX_CHOICES}, not {n * len(prompts)}", "n")
    if max_tokens is not None and max_tokens < 1:
        raise bad(f"max_tokens must be at least 1, not {max_tokens}", "max_tokens")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise bad("stream_options must be an object", "stream_options")
    stream = bool(field(body, "stream", bool, False))
    if options and not stream:
        raise bad("stream_options needs stream to be true", "stream_options")
    return Ask(
        chat=chat,
        prompts=prompts,
        prompt_texts=texts,
        n=n,
        max_tokens=max_tokens,
        sampling=_sampling(body, logprobs),
        stop=_stops(body.get("stop")),
        stream=stream,
        include_usage=bool((options or {}).get("include_usage", False)),
        logprobs=logprobs,
        echo=echo,
        include_stop=bool(field(body, "include_stop_str_in_output", bool, False)),
    )


def _sampling(body: dict[str, Any], logprobs: int) -> SamplingParams:
    seed = field(body, "seed", int, None)

    def number(name: str, default: float) -> float:
        return float(field(body, name, float, default))

    try:
        return SamplingParams(
            temperature=number("temperature", 1.0),
            top_p=number("top_p", 1.0),
            top_k=field(body, "top_k", int, 0),
            min_p=number("min_p", 0.0),
            seed=secrets.randbits(62) if seed is None else seed,
            repetition_penalty=number("repetition_penalty", 1.0),
            presence_penalty=number("presence_penalty", 0.0),
            frequency_penalty=number("frequency_penalty", 0.0),
            logit_bias=_bias(body.get("logit_bias")),
            logprobs=logprobs,
            ignore_eos=bool(field(body, "ignore_eos", bool, False)),
            min_tokens=field(body, "min_tokens", int, 0),
            stop_token_ids=tuple(_ids(body.get("stop_token_ids") or [], "stop_token_ids")),
        )
    except InvalidRequest as error:
        raise bad(str(error), error.param) from error


def check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises ApiError for a token id that the model does not have."""
    for name in ("logit_bias", "stop_token_ids"):
        outside = [t for t in getattr(sampling, name) if not 0 <= t < vocab_size]
        if outside:
            raise bad(f"{name}: token id {outside[0]} is outside 0..{vocab_size - 1}", name)


def field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """`body[name]` as `kind`, null and absent as `default`. Raises ApiError for another type."""
    value = body.get(name)
    if value is None:
        return default
    accepts = (int, float) if kind is float else (kind,)
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    if not isinstance(value, accepts) or (isinstance(value, bool) and kind is not bool):
        raise bad(f"{name} must be {names[kind]}, not {value!r}", name)
    if isinstance(value, int) and value not in INT64:
        raise bad(f"{name} must fit into 64 bits", name)
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise bad(f"{name} must be a list of at least one entry", name)
    return value


def _message(message: Any, i: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad(f"messages[{i}] must be an object with role and content", f"messages[{i}]")
    if message.get("role") not in ROLES:
        raise bad(f"messages[{i}].role {message.get('role')!r} is not one of {', '.join(ROLES)}", f"messages[{i}].role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if None in parts or not all(isinstance(p, str) for p in parts):
            raise bad(f"messages[{i}].content may hold text parts only", f"messages[{i}].content")
        content = "".join(parts)
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise bad(f"messages[{i}].content must be a string", f"messages[{i}].content")
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": content}


def _prompts(prompt: Any, tokenizer: Tokenizer) -> tuple[list[list[int]], list[str]]:
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise bad("prompt must be a string, a list of strings, token ids, or a list of token id lists", "prompt")
    if all(isinstance(p, int) and not isinstance(p, bool) for p in prompt):
        prompt = [prompt]
    ids = [_encoded(tokenizer, p, "prompt", True) if isinstance(p, str) else _ids(p, "prompt") for p in prompt]
    texts = [
        p if isinstance(p, str) else tokenizer.decode(i, skip_special=False) for p, i in zip(prompt, ids, strict=True)
    ]
    if not all(ids):
        raise bad("the prompt is empty", "prompt")
    return ids, texts


def _encoded(tokenizer: Tokenizer, text: str, name: str, add_special: bool = False) -> list[int]:
    """`add_special` puts the tokens before a bare prompt that the model expects; a chat template writes its own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad(f"{name} holds half of a surrogate pair, which is not text: {error}", name) from None
    return tokenizer.encode(text, add_special=add_special)


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in value):
        raise bad(f"{name} must hold whole token ids", name)
    return value


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        raise bad(f"stop must be a string or a list of up to {MAX_STOPS} strings, none of them empty", "stop")
    return stops


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    try:
        bias = {int(token): float(amount) for token, amount in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise bad("logit_bias must map token ids to numbers", "logit_bias") from None
    if any(not -100 <= amount <= 100 or token < 0 for token, amount in bias.items()):
        raise bad("logit_bias values must lie between -100 and 100, for token ids of at least 0", "logit_bias")
    return bias
