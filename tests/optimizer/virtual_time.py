"""Real sockets, virtual clock: an event loop whose time jumps to the next timer once no socket has anything to say.

A scripted server and the client under test run in one such loop, so what a client sees is exact.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
QUIET_S = 0.003  # real time within which loopback bytes surely arrive


class _JumpingSelector:
    def __init__(self) -> None:
        self.real = selectors.DefaultSelector()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = self.real.select(min(timeout, QUIET_S) if timeout else timeout)
        if not ready and timeout:
            self.now += timeout
        return ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)  # type: ignore[arg-type]
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass
class Seen:
    """A request as the server saw it; `at` is virtual seconds since the server's start."""

    at: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Stream:
    """What a script writes its answer with."""

    writer: asyncio.StreamWriter
    start: float
    seen: Seen
    _sent_head: bool = False

    async def head(self, status: int = 200, headers: str = "transfer-encoding: chunked") -> None:
        self.writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: text/event-stream\r\n{headers}\r\n\r\n".encode())
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, payload: Any) -> None:
        await self.raw(b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n")

    async def text(self, text: str, finish: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    async def end(self, prompt: int | None = None, completion: int = 0, cached: int = 0) -> None:
        """The usage event, when counts are given, then the end of the stream."""
        if prompt is not None:
            details = {"prompt_tokens_details": {"cached_tokens": cached}}
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, **details}
            await self.event({"choices": [], "usage": usage})
        await self.event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def until(self, at: float) -> None:
        """Waits for `at` virtual seconds after this request came in."""
        await asyncio.sleep(self.start + at - asyncio.get_running_loop().time())


Script = Callable[[Stream], Awaitable[None]]


@dataclass
class ScriptedServer:
    url: str
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def scripted_server(script: Script) -> AsyncIterator[ScriptedServer]:
    """Serves `script` for every request, on keep-alive connections, until the block ends."""
    loop = asyncio.get_running_loop()
    state = ScriptedServer("")
    begin = loop.time()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw) if raw else {}
                seen = Seen(loop.time() - begin, head[0].split(" ")[1], headers, body)
                state.seen.append(seen)
                await script(Stream(writer, loop.time(), seen))
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
