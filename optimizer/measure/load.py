"""A load generator for any OpenAI-compatible server: closed loop (so many users) or open loop (so many arrivals).

What the figures mean. Latencies count from the *intended* send time: in an open loop the arrival time, in a closed
loop the moment the user was free; so a slow server cannot hide the requests it delays. TTFT ends with the first chunk
that carries content (a chunk with a role only is none). ITL are the gaps between content chunks after that, TTFT is not
among them. E2EL ends with the last chunk that carries a choice. Tokens are counted by the server's usage field, or by a
tokenizer given for servers without one; never by chunks. Throughput is tokens of finished requests over the span from
the first intended send to the last end. Failed requests are kept and counted apart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from optimizer.measure.http_stream import Address, Client, HttpError, Reply
from optimizer.measure.samples import LoadResult, RequestSample

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
STYLES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `url` is with or without a trailing /v1. The key is in no error or log."""

    url: str
    model: str
    style: str = "completions"  # or chat
    api_key: str = field(default="", repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    extra: dict[str, Any] = field(default_factory=lambda: dict(GREEDY))  # body fields beside the standard ones
    count_tokens: Callable[[str], int] | None = field(default=None, repr=False)
    timeout_s: float = 600.0  # of one request

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"style {self.style!r} is unknown: completions or chat")
        self.address()

    def address(self) -> Address:
        """Raises HttpError for what is no address."""
        return Address.parse(self.url.rstrip("/").removesuffix("/v1"))

    def client(self) -> Client:
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return Client(self.address(), {**self.headers, **key})


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. `prompt`: token ids (completions only) or text. `at`: intended seconds from the start (open loop).

    `sampling`: body fields that say how its tokens are drawn, over the target's own.
    """

    prompt: Sequence[int] | str
    max_tokens: int
    at: float = 0.0
    sampling: dict[str, Any] = field(default_factory=dict)


def run_closed_loop(
    target: Target, requests: Sequence[LoadRequest], concurrency: int, warmup: Sequence[LoadRequest] = ()
) -> LoadResult:
    """`concurrency` users who each send the next request as soon as their last one ended."""
    return asyncio.run(closed_loop(target, requests, concurrency, warmup))


def run_open_loop(target: Target, requests: Sequence[LoadRequest], warmup: Sequence[LoadRequest] = ()) -> LoadResult:
    """Every request at its own time `at`, whether or not earlier ones have ended."""
    return asyncio.run(open_loop(target, requests, warmup))


async def closed_loop(
    target: Target, requests: Sequence[LoadRequest], concurrency: int, warmup: Sequence[LoadRequest] = ()
) -> LoadResult:
    if not requests or concurrency < 1:
        raise ValueError("a load needs at least one request and one user")
    run = _Run(target)
    try:
        await run.warm_up(warmup, concurrency)
        queue = list(enumerate(run.body(r) for r in requests))[::-1]
        start = run.now()

        async def user() -> None:
            while queue:
                index, body = queue.pop()
                await run.send(index, body, start, run.now() - start)

        await asyncio.gather(*(user() for _ in range(min(concurrency, len(requests)))))
        return run.result(concurrency)
    finally:
        await run.client.close()


async def open_loop(target: Target, requests: Sequence[LoadRequest], warmup: Sequence[LoadRequest] = ()) -> LoadResult:
    if not requests:
        raise ValueError("a load needs at least one request")
    run = _Run(target)
    try:
        await run.warm_up(warmup, 1)
        bodies = [run.body(r) for r in requests]
        start = run.now()

        async def arrive(index: int) -> None:
            await asyncio.sleep(start + requests[index].at - run.now())
            await run.send(index, bodies[index], start, requests[index].at)

        await asyncio.gather(*(arrive(i) for i in range(len(requests))))
        return run.result(0)
    finally:
        await run.client.close()


class _Run:
    """One measurement against one target. The clock is the event loop's."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.client = target.client()
        self.now = asyncio.get_running_loop().time
        self.samples: list[RequestSample] = []

    def body(self, request: LoadRequest) -> bytes:
        """Encoded ahead of the measured span."""
        text = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        chat = self.target.style == "chat"
        prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        common = {"model": self.target.model, "max_tokens": request.max_tokens, "stream": True}
        extra = {"stream_options": {"include_usage": True}, **self.target.extra, **request.sampling}
        return json.dumps({**common, **prompt, **extra}).encode()

    async def warm_up(self, requests: Sequence[LoadRequest], concurrency: int) -> None:
        """Raises HttpError when a warm-up request fails: nothing worth measuring would follow."""
        for i in range(0, len(requests), max(1, concurrency)):
            batch = requests[i : i + max(1, concurrency)]
            await asyncio.gather(*(self.send(j, self.body(r), self.now(), 0.0) for j, r in enumerate(batch)))
        failed = [s for s in self.samples if not s.ok]
        self.samples.clear()
        if failed:
            raise HttpError(f"A warm-up request failed: {failed[0].error}")

    async def send(self, index: int, body: bytes, start: float, intended_s: float) -> None:
        stream = StreamReader(self.now)
        sent, status, error, version = self.now(), 0, "", ""
        try:
            async with asyncio.timeout(self.target.timeout_s):
                async with self.client.request("POST", STYLES[self.target.style], body) as reply:
                    status, version = reply.status, reply.headers.get("x-polymorph-version", "")
                    error = await self._read(reply, stream)
        except HttpError as problem:
            error = str(problem)
        except TimeoutError:
            error = f"no whole answer within {self.target.timeout_s:g} s"
        error = error or stream.problem(self.target.count_tokens is not None)
        if self.target.api_key:
            error = error.replace(self.target.api_key, "<api key>")  # a server may quote it in a refusal
        self.samples.append(self._sample(index, start, intended_s, sent, status, error, version, stream))

    async def _read(self, reply: Reply, stream: StreamReader) -> str:
        """Feeds the stream; returns what went wrong, or nothing."""
        if reply.status != 200:
            return _message(await reply.text()) or f"the server answered {reply.status}"
        async for piece in reply.body():
            stream.feed(piece)
        return stream.error

    def _sample(
        self,
        index: int,
        start: float,
        intended: float,
        sent: float,
        status: int,
        error: str,
        version: str,
        s: StreamReader,
    ) -> RequestSample:
        origin = start + intended
        ended = s.last_choice or self.now()
        count = self.target.count_tokens
        return RequestSample(
            index=index,
            intended_s=intended,
            sent_s=sent - start,
            ttft_s=(s.content_at[0] if s.content_at else ended) - origin,
            itl_s=tuple(b - a for a, b in pairwise(s.content_at)),
            e2el_s=ended - origin,
            isl=s.prompt_tokens,
            osl=s.completion_tokens if s.completion_tokens is not None else count(s.text) if count and not error else 0,
            cached_tokens=s.cached_tokens,
            status=status,
            finish_reason=s.finish_reason,
            error=error,
            version=version,
        )

    def result(self, concurrency: int) -> LoadResult:
        ordered = sorted(self.samples, key=lambda s: s.index)
        first = min(s.intended_s for s in ordered)
        return LoadResult(tuple(ordered), max(s.intended_s + s.e2el_s for s in ordered) - first, concurrency)


class StreamReader:
    """Server-sent events of one answer, timed as they arrive. Bytes may be cut anywhere."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left = b""
        self.content_at: list[float] = []
        self.last_choice = 0.0
        self.text = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens: int | None = None
        self.finish_reason = ""
        self.error = ""
        self.done = False

    def feed(self, piece: bytes) -> None:
        lines = (self._left + piece).split(b"\n")
        self._left = lines.pop()
        at = self._now()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at)

    def problem(self, has_tokenizer: bool) -> str:
        """Why an answer that seemed to end well cannot be counted, or nothing."""
        if not self.finish_reason:
            return "the stream ended without a finish reason"
        if self.completion_tokens is None and not has_tokenizer:
            return "the server sent no usage field: give a tokenizer to count tokens with"
        return ""

    def _event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = "the stream holds an event that is not JSON"
            return
        if event.get("error"):
            self.error = _message(data.decode(errors="replace")) or "the stream ended with an error"
        for choice in event.get("choices") or ():
            self._choice(choice, at)
        if usage := event.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.completion_tokens = usage.get("completion_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if content:
            self.content_at.append(at)
            self.text += content
        self.last_choice = at
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _message(body: str) -> str:
    """The message of an error in OpenAI's shape, or the start of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return body.strip()[:200]
