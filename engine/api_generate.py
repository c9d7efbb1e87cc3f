"""One HTTP request's choices, from submission to their last token. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.api_requests import ApiError, Ask, bad
from engine.api_responses import Choice, Writer, encode_json, sse
from engine.models.tokenizer import Tokenizer
from engine.runner import EngineRunner
from engine.sequence import GenerationRequest, InvalidRequest, TokenEvent
from engine.stream import TextStream

SEED_STEP = 0x9E3779B97F4A7C15  # choices of one seeded request draw from seeds this far apart
STATUS_OF = {"engine_restarted": 503, "refused": 400}


class Generation:
    """Submitted when made. Whoever makes one calls `close`, which aborts what has not ended."""

    def __init__(self, ask: Ask, runner: EngineRunner, tokenizer: Tokenizer, ids: Iterator[int]) -> None:
        """Raises ApiError, with nothing submitted, when one of its prompts can never run."""
        self.ask, self._runner, self._tokenizer = ask, runner, tokenizer
        self.started = time.perf_counter()
        self.ttft_s = 0.0
        self.choices: list[Choice] = []
        self._open: dict[int, Choice] = {}
        self._events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        for request in self._requests(ids):
            runner.submit(request, self._events)

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def version(self) -> str:
        """Hash of the artefact that the request started on."""
        return next((c.version for c in self.choices if c.version), "")

    def hang_up(self) -> None:
        """The client has gone: whoever waits for parts gets ClientDisconnect."""
        self._events.put_nowait(None)

    def close(self) -> None:
        for request_id in self._open:
            self._runner.abort(request_id)
        self._open.clear()

    async def parts(self) -> list[tuple[Choice, str]]:
        """What came since last asked, a part for each choice. Raises ApiError when the engine fails, ClientDisconnect."""
        parts = [self._take(await self._events.get())]
        while not self._events.empty() and not self.done:
            parts.append(self._take(self._events.get_nowait()))
        if self.ttft_s == 0.0:
            self.ttft_s = time.perf_counter() - self.started
        joined: dict[int, tuple[Choice, str]] = {}  # one part a choice: only the last of several could say how it ended
        for choice, text in (p for p in parts if p is not None):
            joined[choice.index] = choice, joined.get(choice.index, (choice, ""))[1] + text
        return list(joined.values())

    def _take(self, event: TokenEvent | None) -> tuple[Choice, str] | None:
        if event is None:
            raise ClientDisconnect
        choice = self._open.get(event.request_id)
        if choice is None:  # tokens made before the engine heard that a stop string had ended it
            return None
        if event.finish_reason == "error":
            message = event.error or "the engine failed"
            raise ApiError(STATUS_OF.get(event.error_code, 500), message, code=event.error_code or "engine_failed")
        text = choice.take(event, self.ask, self._tokenizer, self._tokenizer.eos_ids)
        if choice.finish_reason:
            del self._open[event.request_id]
            if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                self._runner.abort(event.request_id)
        return choice, text

    def _requests(self, ids: Iterator[int]) -> list[GenerationRequest]:
        ask, requests = self.ask, []
        limit = self._runner.limit
        for p, prompt in enumerate(ask.prompts):
            for k in range(ask.n):
                seed = (ask.sampling.seed + k * SEED_STEP) % (1 << 62)
                most = limit - len(prompt) if ask.max_tokens is None else ask.max_tokens
                sampling = replace(ask.sampling, seed=seed)
                request = GenerationRequest(next(ids), prompt, max(most, 1), sampling, self._tokenizer.eos_ids)
                try:
                    self._runner.check(request)
                except InvalidRequest as error:
                    raise bad(str(error), error.param, error.code) from error
                text = TextStream(self._tokenizer, ask.stop, ask.include_stop, ask.sampling.min_tokens)
                offset = len(ask.prompt_texts[p]) if ask.echo else 0
                self._open[request.id] = Choice(len(requests), p, text, offset)
                requests.append(request)
        self.choices = list(self._open.values())
        return requests

    def shape(self, writer: Writer) -> bytes:
        """Token counts and time to first token, for the gateway's record."""
        usage = writer.usage(self.choices)
        return encode_json(
            {
                "isl": usage["prompt_tokens"],
                "osl": usage["completion_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "ttft_s": self.ttft_s,
            }
        )


class EventStream(Response):
    """Sends a generation as server-sent events, from its first parts on. Ends the generation whatever happens."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        first: list[tuple[Choice, str]],
        headers: dict[str, str],
        with_shape: bool,
        watch: asyncio.Task[None],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._generation, self._writer, self._first = generation, writer, first
        self._with_shape, self._watch = with_shape, watch
        self.status = 200  # what is counted: an engine that fails midway cannot change what was sent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        generation, writer = self._generation, self._writer
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            parts = self._first
            while True:
                if data := b"".join(writer.part(choice, text) for choice, text in parts):
                    await body(data)
                if generation.done:
                    break
                parts = await generation.parts()
            shape = b": shape " + generation.shape(writer) + b"\n\n" if self._with_shape else b""
            await body(shape + writer.end(generation.choices), False)
        except ApiError as error:
            self.status = error.status
            await body(sse(error.body()), False)
        except (ClientDisconnect, OSError):
            self.status = 499
        finally:
            self._watch.cancel()
            generation.close()
            if self.background is not None:
                await self.background()
