"""One question to a chat-completions API, with patience for faults that pass, and never longer than the search goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletion

from optimizer.agents.llm.faults import Fault, Stopped, explain
from optimizer.agents.llm.purse import Purse, Tokens
from optimizer.agents.llm.settings import LlmSettings

Message = dict[str, str]
TRIES = 4  # of one call, faults that pass included
CONNECT_S = 10.0
POLL_S = 0.2  # how often a wish to stop is looked for
CHARACTERS_A_TOKEN = 3.0  # of source text, on the low side, so that what is counted by it fits
NEWER_LIMIT = "max_completion_tokens"  # what some servers want in the place of `max_tokens`


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    cut: bool = False  # the answer reached its limit of tokens


def count_tokens(messages: Sequence[Message]) -> int:
    """About how many tokens these are, rather more than fewer."""
    return round(sum(len(m["content"]) for m in messages) / CHARACTERS_A_TOKEN) + 8 * len(messages)


class Client:
    """Asks for one agent. Every call is reserved in the purse before it is made and settled after it."""

    def __init__(
        self, agent: str, settings: LlmSettings, purse: Purse, stopped: Callable[[], bool], pause_s: float = 1.0
    ) -> None:
        self.agent, self.settings, self.purse, self.stopped, self.pause_s = agent, settings, purse, stopped, pause_s
        self._limit = "max_tokens"

    def ask(self, messages: Sequence[Message]) -> Reply:
        """Raises CapReached before a call that could pass a cap, Stopped, and Fault for what patience does not mend."""
        for attempt in range(1, TRIES + 1):
            try:
                return self._try(messages)
            except Fault as fault:
                if not fault.again or attempt == TRIES:
                    raise
                pause = self.pause_s * 2 ** (attempt - 1)
                self._wait(pause if fault.wait_s is None else fault.wait_s)
        raise AssertionError("the last try returns or raises")

    def _try(self, messages: Sequence[Message]) -> Reply:
        sent = count_tokens(messages)
        self.purse.reserve(self.agent, sent, self.settings.answer_tokens)
        took: Tokens | None = Tokens(sent, 0, estimated=True)
        failure = "stopped"
        try:
            reply, took = self._answer(messages, sent)
            failure = ""
            return reply
        except Fault as fault:
            took, failure = fault.tokens, fault.kind
            raise
        finally:
            self.purse.settle(self.agent, took, failure)

    def _answer(self, messages: Sequence[Message], sent: int) -> tuple[Reply, Tokens]:
        try:
            return _read(asyncio.run(self._watched(messages)), sent)
        except (openai.OpenAIError, ValueError) as error:  # ValueError: a body that is no JSON
            if isinstance(error, openai.BadRequestError) and NEWER_LIMIT in str(error) and self._limit != NEWER_LIMIT:
                self._limit = NEWER_LIMIT
                raise Fault("parameter", f"This server wants {NEWER_LIMIT}.", again=True, wait_s=0.0) from None
            raise explain(error, self.settings, sent) from None

    async def _watched(self, messages: Sequence[Message]) -> Any:
        """The server's answer. A wish to stop, or the time limit, breaks the connection off: nothing more is billed."""
        settings = self.settings
        timeout = httpx.Timeout(settings.timeout_s, connect=min(CONNECT_S, settings.timeout_s))
        async with openai.AsyncOpenAI(
            base_url=settings.base_url, api_key=settings.key or "none", max_retries=0, timeout=timeout
        ) as http:
            limit = {self._limit: settings.answer_tokens}
            call = http.chat.completions.create(model=settings.model, messages=list(messages), **limit)  # type: ignore[call-overload]
            task, deadline = asyncio.ensure_future(call), time.monotonic() + settings.timeout_s
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                late = time.monotonic() > deadline
                if not task.done() and (late or self.stopped()):
                    task.cancel()
                    await asyncio.wait({task})
                    raise openai.APITimeoutError(httpx.Request("POST", settings.base_url)) if late else Stopped
            return task.result()

    def _wait(self, seconds: float) -> None:
        """Raises Stopped as soon as the search is over."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.stopped():
                raise Stopped
            time.sleep(min(POLL_S, left))


def _read(answer: Any, sent: int) -> tuple[Reply, Tokens]:
    """The text and what it took. Raises Fault for a refusal or silence, OpenAIError for what is no completion."""
    if not isinstance(answer, ChatCompletion) or not answer.choices or not answer.choices[0].message:
        raise openai.OpenAIError("it has no choices")
    choice, message = answer.choices[0], answer.choices[0].message
    text, cut = message.content or "", choice.finish_reason == "length"
    tokens = _tokens(answer, sent, text)
    if message.refusal or choice.finish_reason == "content_filter":
        why = " ".join((message.refusal or "its content filter stopped it").split())[:200]
        raise Fault("refusal", f"The language model refused: {why}", tokens=tokens)
    if not text.strip():
        why = "all its tokens went into thinking" if cut else "it said nothing"
        raise Fault("empty", f"The language model gave an empty answer: {why}.", tokens=tokens)
    return Reply(text, cut), tokens


def _tokens(answer: ChatCompletion, sent: int, text: str) -> Tokens:
    usage = answer.usage
    if usage is None:  # the server does not count
        return Tokens(sent, round(len(text) / CHARACTERS_A_TOKEN), estimated=True)
    details = usage.prompt_tokens_details
    cached = min((details.cached_tokens or 0) if details else 0, usage.prompt_tokens)
    return Tokens(usage.prompt_tokens, usage.completion_tokens, cached)
