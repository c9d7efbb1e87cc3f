"""A small HTTP/1.1 client for the API servers that the gateway starts: one request a connection, bodies as they come.

The gateway passes every token of every stream on and shares the processors with the model: this costs a few
microseconds a chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

import httptools

READ_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 5.0


class UpstreamDied(Exception):
    """The connection ended before the answer did."""


class Reply:
    """One answer. `head` waits for status and headers, `read` for the next bytes of the body (empty at its end)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._in_body = self._complete = False
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; a server that is still answering takes it for a client that left."""
        self._writer.close()

    async def head(self) -> None:
        while not self._in_body:
            await self._feed()

    async def read(self) -> bytes:
        while not self._parts and not self._complete:
            await self._feed()
        data, self._parts = b"".join(self._parts), []
        return data

    async def read_all(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise UpstreamDied("the server closed the connection before its answer was complete")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise UpstreamDied(f"the connection to the server broke: {error}") from error

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status, self._in_body = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True


async def send(port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Reply:
    """Sends one request to a server on this machine. Raises UpstreamDied when it cannot be reached."""
    lines = {
        "host": f"127.0.0.1:{port}",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError) as error:
        raise UpstreamDied(f"the server on port {port} cannot be reached: {error}") from error
    writer.write(head.encode("latin-1") + body)
    with contextlib.suppress(OSError):  # reading the answer tells what went wrong
        await writer.drain()
    return Reply(reader, writer)
