"""Writing OpenAI-shaped answers: choices, chunks, logprobs and usage."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from engine.api_requests import Ask
from engine.models.tokenizer import Tokenizer
from engine.sequence import TokenEvent
from engine.stream import TextStream


@dataclass
class Choice:
    """One choice as it grows."""

    index: int
    prompt: int  # which of the request's prompts
    text_stream: TextStream
    text: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    version: str = ""
    finish_reason: str | None = None
    logprobs: list[tuple[str, float, list[tuple[str, float]]]] = field(default_factory=list)

    def take(self, event: TokenEvent, ask: Ask, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> str:
        """Adds one event; returns the text it lets out."""
        self.tokens += 1
        self.cached_tokens, self.version = event.cached_tokens, event.version
        ended_by_token = event.finish_reason == "stop"
        if ask.logprobs >= 0 and not math.isnan(event.logprob):
            top = [(tokenizer.token(t), p) for t, p in event.top]
            self.logprobs.append((tokenizer.token(event.token_id), event.logprob, top))
        hidden = ended_by_token and (event.token_id in eos_ids or event.token_id in ask.sampling.stop_token_ids)
        text = self.text_stream.finish() if hidden else self.text_stream.push(event.token_id, last=event.finish_reason is not None)
        self.finish_reason = "stop" if self.text_stream.stopped else event.finish_reason
        self.text += text
        return text


class Writer:
    """The frame all parts of one answer share: id, time, model name."""

    def __init__(self, ask: Ask, model: str) -> None:
        self.ask, self.model, self.created = ask, model, int(time.time())
        self.id = ("chatcmpl-" if ask.chat else "cmpl-") + secrets.token_hex(12)
        self.kind = "chat.completion" if ask.chat else "text_completion"

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return self._frame(self.kind, [self._choice(c) for c in choices]) | {"usage": self.usage(choices)}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The role-only chunk that opens a chat choice; the echoed prompt of a completion that asked for it."""
        if self.ask.chat:
            return self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        if self.ask.echo:
            return self._chunk(choice, {"text": self.ask.prompt_texts[choice.prompt], "logprobs": None})
        return None

    def part(self, choice: Choice, text: str) -> dict[str, Any]:
        """A chunk with new text; the choice's finish reason on its last one."""
        if self.ask.chat:
            body: dict[str, Any] = {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(choice, True)}
        else:
            body = {"text": text, "logprobs": self._logprobs(choice, True)}
        return self._chunk(choice, body, choice.finish_reason)

    def end(self, choices: list[Choice]) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: no choices."""
        kind = "chat.completion.chunk" if self.ask.chat else self.kind
        return self._frame(kind, []) | {"usage": self.usage(choices)}

    def usage(self, choices: list[Choice]) -> dict[str, Any]:
        prompt = sum(len(p) for p in self.ask.prompts)
        completion = sum(c.tokens for c in choices)
        cached = sum(next(c.cached_tokens for c in choices if c.prompt == i) for i in range(len(self.ask.prompts)))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, choice: Choice, body: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.ask.chat else self.kind
        frame = self._frame(kind, [{"index": choice.index, **body, "finish_reason": reason}])
        return frame | {"usage": None} if self.ask.include_usage else frame

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shared = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice, False)}
        if self.ask.chat:
            return shared | {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return shared | {"text": (self.ask.prompt_texts[choice.prompt] if self.ask.echo else "") + choice.text}

    def _logprobs(self, choice: Choice, newest: bool) -> dict[str, Any] | None:
        """Of all tokens, or in a stream of those since the last chunk (which are then forgotten)."""
        if self.ask.logprobs < 0:
            return None
        entries, choice.logprobs = choice.logprobs, [] if newest else choice.logprobs
        if self.ask.chat:
            return {"content": [_chat_entry(t, p) | {"top_logprobs": [_chat_entry(*a) for a in top]} for t, p, top in entries]}
        offsets, place = [], 0
        for token, _, _ in entries:
            offsets.append(place)
            place += len(token)
        return {
            "tokens": [t for t, _, _ in entries],
            "token_logprobs": [p for _, p, _ in entries],
            "top_logprobs": [dict(top) for _, _, top in entries],
            "text_offset": offsets,
        }


def _chat_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
