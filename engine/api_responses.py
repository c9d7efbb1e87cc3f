"""Writing OpenAI-shaped answers: choices, chunks, logprobs and usage."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from engine.api_requests import Ask
from engine.models.tokenizer import Tokenizer
from engine.sequence import TokenEvent
from engine.stream import TextStream

encode_json = msgspec.json.Encoder().encode


class Logprob(NamedTuple):
    """A token as text, its bytes and its logprob, with the alternatives to it (which have none themselves)."""

    token: str
    raw: bytes
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass
class Choice:
    """One choice as it grows. `offset` counts the whole characters of tokens whose logprobs have been written."""

    index: int
    prompt: int  # which of the request's prompts
    text_stream: TextStream
    offset: int = 0
    text: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    version: str = ""
    finish_reason: str | None = None
    opened: bool = False  # its first chunk has been written
    logprobs: list[Logprob] = field(default_factory=list)
    decode: Callable[[bytes], str] = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace").decode
    )

    def take(self, event: TokenEvent, ask: Ask, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> str:
        """Adds one event; returns the text it lets out. The token that ends a choice is counted, but not shown."""
        self.tokens += 1
        self.cached_tokens, self.version = event.cached_tokens, event.version
        ends = event.token_id in eos_ids or event.token_id in ask.sampling.stop_token_ids
        if event.finish_reason == "stop" and ends:
            text = self.text_stream.finish()
        else:
            text = self.text_stream.push(event.token_id, last=event.finish_reason is not None)
            if ask.logprobs >= 0:
                top = tuple(_logprob(tokenizer, token, p) for token, p in event.top)
                self.logprobs.append(_logprob(tokenizer, event.token_id, event.logprob, top))
        self.finish_reason = "stop" if self.text_stream.stopped else event.finish_reason
        self.text += text
        return text


class Writer:
    """The frame all parts of one answer share: id, time, model name."""

    def __init__(self, ask: Ask, model: str) -> None:
        self.ask, self.model, self.created = ask, model, int(time.time())
        self.id = ("chatcmpl-" if ask.chat else "cmpl-") + secrets.token_hex(12)
        self.kind = "chat.completion" if ask.chat else "text_completion"
        self.part_kind = "chat.completion.chunk" if ask.chat else self.kind

    def whole(self, choices: list[Choice]) -> bytes:
        frame = self._frame(self.kind, [self._choice(c) for c in choices])
        return encode_json(frame | {"usage": self.usage(choices)})

    def part(self, choice: Choice, text: str) -> bytes:
        """Server-sent events for new text of a choice: none while there is nothing to show.

        The first of a choice comes with what opens it: the role of a chat message, or the prompt to be echoed.
        """
        if not text and not choice.finish_reason:
            return b""
        opening = b""
        if not choice.opened:
            choice.opened = True
            opening = self._opening(choice)
        shown: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.ask.chat else {"text": text}
        return opening + self._chunk(choice, shown | {"logprobs": self._logprobs(choice)}, choice.finish_reason)

    def end(self, choices: list[Choice]) -> bytes:
        """What closes a stream: the usage without choices, where it was asked for, and the end mark."""
        usage = b""
        if self.ask.include_usage:
            usage = sse(self._frame(self.part_kind, []) | {"usage": self.usage(choices)})
        return usage + DONE

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

    def _opening(self, choice: Choice) -> bytes:
        if self.ask.chat:
            return self._chunk(choice, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})
        if self.ask.echo:
            return self._chunk(choice, {"text": self.ask.prompt_texts[choice.prompt], "logprobs": None})
        return b""

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, choice: Choice, body: dict[str, Any], reason: str | None = None) -> bytes:
        frame = self._frame(self.part_kind, [{"index": choice.index, **body, "finish_reason": reason}])
        return sse(frame | {"usage": None} if self.ask.include_usage else frame)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shared = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice),
        }
        if self.ask.chat:
            return shared | {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return shared | {"text": (self.ask.prompt_texts[choice.prompt] if self.ask.echo else "") + choice.text}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of the tokens since it was last asked."""
        if self.ask.logprobs < 0:
            return None
        entries, choice.logprobs = choice.logprobs, []
        if self.ask.chat:
            return {"content": [_chat_entry(e) | {"top_logprobs": [_chat_entry(a) for a in e.top]} for e in entries]}
        offsets = []
        for entry in entries:
            offsets.append(choice.offset)
            choice.offset += len(choice.decode(entry.raw))
        return {
            "tokens": [_printed(e) for e in entries],
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [{_printed(a): a.logprob for a in e.top} for e in entries],
            "text_offset": offsets,
        }


DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(body) + b"\n\n"


def _logprob(tokenizer: Tokenizer, token: int, logprob: float, top: tuple[Logprob, ...] = ()) -> Logprob:
    text = tokenizer.token(token)
    return Logprob(text, tokenizer.token_bytes(token) or text.encode(), max(logprob, LOWEST), top)


LOWEST = -9999.0  # JSON has no minus infinity: a token that was ruled out


def _printed(entry: Logprob) -> str:
    """A token as text; part of a character by its bytes, so that different tokens never read the same."""
    if "\ufffd" not in entry.token:
        return entry.token
    return "bytes:" + "".join(f"\\x{b:02x}" for b in entry.raw)


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.raw)}
