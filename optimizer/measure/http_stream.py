"""A lean HTTP/1.1 client for streamed answers: what a load generator needs, at little cost to the server.

Plain or TLS, keep-alive, bodies by length, in chunks or until close. It follows no redirects and uses no proxy. The
request's headers may hold a secret: they appear in no error and in no representation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

READ = 1 << 16
HEAD_LIMIT = 1 << 16


class HttpError(Exception):
    """The server cannot be reached, or what it sends is not HTTP. The text is a sentence without headers."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, from an http(s) URL. `path` is the URL's path without a trailing slash."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises HttpError for what is no http(s) URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise HttpError(f"{url!r} is not an address: {error}.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{url!r} is not an address: give http://host:port or https://host.")
        if parts.username or parts.password:
            raise HttpError("The address holds a user name or password: give the API key by itself.")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"


@dataclass(slots=True)
class _Wire:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class Reply:
    """A response whose head has arrived. `body()` yields its bytes as they come, once."""

    status: int
    headers: dict[str, str]
    _wire: _Wire = field(repr=False)
    whole: bool = False  # the body was read to its end and the connection can serve again

    async def body(self) -> AsyncIterator[bytes]:
        reader = self._wire.reader
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            async for piece in _chunked(reader):
                yield piece
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left:
                piece = await _some(reader, left)
                left -= len(piece)
                yield piece
        else:
            while piece := await reader.read(READ):
                yield piece
            return
        self.whole = self.headers.get("connection", "").lower() != "close"

    async def text(self, limit: int = 1 << 20) -> str:
        """The body as text, cut at `limit` bytes."""
        data = bytearray()
        async for piece in self.body():
            data += piece
            if len(data) > limit:
                break
        return data[:limit].decode(errors="replace")


class Client:
    """Requests to one address. Connections are kept and used again, one request at a time."""

    def __init__(self, address: Address, headers: Mapping[str, str] = {}, connect_timeout_s: float = 10) -> None:
        self._address = address
        self._headers = {"host": f"{address.host}:{address.port}", "accept": "*/*", **headers}
        self._timeout = connect_timeout_s
        self._idle: list[_Wire] = []

    def __repr__(self) -> str:
        return f"Client({self._address})"

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Reply]:
        """Sends one request and gives the reply once its head is there. Raises HttpError.

        A kept connection that turns out closed before it answered is replaced once.
        """
        head = self._head(method, path, len(body))
        wire, reply = None, None
        try:
            while reply is None:
                kept = bool(self._idle)
                wire = self._idle.pop() if kept else await self._connect()
                try:
                    wire.writer.write(head + body)
                    reply = await _read_head(wire)
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    wire.writer.close()
                    if not kept:
                        raise HttpError(f"{self._address} closed the connection before it answered.") from error
            yield reply
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise HttpError(f"{self._address} closed the connection in mid-answer.") from error
        finally:
            if wire and reply and reply.whole:
                self._idle.append(wire)
            elif wire:
                wire.writer.close()

    async def close(self) -> None:
        for wire in self._idle:
            wire.writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await wire.writer.wait_closed()
        self._idle.clear()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self._address.path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in self._headers.items())]
        if any("\r" in line or "\n" in line for line in lines):
            raise HttpError("A header or the path holds a line break.")
        lines += ["content-type: application/json", f"content-length: {length}"] if length else []
        return "\r\n".join([*lines, "", ""]).encode()

    async def _connect(self) -> _Wire:
        a = self._address
        context = ssl.create_default_context() if a.tls else None
        try:
            opening = asyncio.open_connection(a.host, a.port, ssl=context, limit=HEAD_LIMIT)
            return _Wire(*await asyncio.wait_for(opening, self._timeout))
        except TimeoutError as error:
            raise HttpError(f"{a} did not accept a connection within {self._timeout:g} s.") from error
        except OSError as error:
            raise HttpError(f"{a} cannot be reached: {error.strerror or error}.") from error


async def _read_head(wire: _Wire) -> Reply:
    try:
        raw = await wire.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        version, code, *_ = first.split(" ", 2)
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        if "content-length" in headers:
            int(headers["content-length"])
        reply = Reply(int(code), headers, wire)
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise HttpError("The server's answer is not HTTP/1.1.") from error
    return await _read_head(wire) if reply.status == 100 else reply


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of a chunked body, yielded as it arrives; trailers are read and dropped."""
    while True:
        line = await reader.readuntil(b"\r\n")
        try:
            left = int(line.split(b";")[0], 16)
        except ValueError as error:
            raise HttpError("The server's answer has a broken chunk.") from error
        if not left:
            break
        while left:
            piece = await _some(reader, left)
            left -= len(piece)
            yield piece
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass


async def _some(reader: asyncio.StreamReader, at_most: int) -> bytes:
    piece = await reader.read(min(at_most, READ))
    if not piece:
        raise asyncio.IncompleteReadError(b"", at_most)
    return piece
