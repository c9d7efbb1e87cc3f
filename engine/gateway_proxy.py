"""One request through the gateway: choose a server, pass the answer on as it comes, try again where that is safe.

Until the first byte has gone to the client nothing has happened, so a canary that fails costs the client nothing:
stable answers. A stable server that ends is waited for, since the gateway starts it again. After the first byte a
failure is told in the stream.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine import upstream
from engine.api_requests import ApiError
from engine.api_responses import sse
from engine.fleet import ApiServer
from engine.gateway_endpoint import ServedEndpoint
from engine.gateway_records import Records
from engine.plan import CANARY, STABLE
from engine.wire import RequestRecord

WAIT_S = 60.0  # for a server that is starting again
TRIES = 3
PASSED_ON = ("content-type", "x-polymorph-version", "x-polymorph-artifact", "x-polymorph-generation")


class Shape(msgspec.Struct):
    """Token counts as the API server tells them."""

    isl: int = 0
    osl: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0


class Exchange:
    """The answer of one server to one request, asked `waited_s` after it came in. In flight there until `close`."""

    def __init__(self, server: ApiServer, reply: upstream.Reply, waited_s: float) -> None:
        self.server, self.reply, self.waited_s = server, reply, waited_s
        self.first = b""
        self._busy = server.serving()
        self._busy.__enter__()

    @property
    def streams(self) -> bool:
        return self.reply.headers.get("content-type", "").startswith("text/event-stream")

    def close(self) -> None:
        self.reply.close()
        self._busy.__exit__(None, None, None)


class Proxy:
    """Forwards requests to endpoints and keeps the records."""

    def __init__(self, records: Records) -> None:
        self.records = records

    async def forward(
        self, request: Request, endpoint: ServedEndpoint, path: str, body: bytes, pinned: str
    ) -> Response:
        """The answer, or a response that streams it. Raises ApiError when no server gave one."""
        clock = Clock()
        watch = asyncio.create_task(_client_left(request))
        work = asyncio.create_task(self._first_bytes(endpoint, path, body, pinned, clock))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            exchange = work.result()
        finally:
            if not work.done():
                work.cancel()
            watch.cancel()
        if exchange.streams:
            return Relay(self, endpoint, exchange, clock)
        shape = _read_shape(exchange.reply.headers.get("x-polymorph-shape", "{}").encode())
        self.record(endpoint, exchange, exchange.reply.status, shape, clock, exchange.waited_s + shape.ttft_s)
        exchange.close()
        return Response(exchange.first, exchange.reply.status, headers=_headers(exchange))

    def record(
        self, endpoint: ServedEndpoint, exchange: Exchange, status: int, shape: Shape, clock: Clock, ttft_s: float
    ) -> None:
        version = exchange.reply.headers.get("x-polymorph-version", exchange.server.version.version_id)
        self._write(endpoint, exchange.server.role, version, status, shape, clock, ttft_s)

    def _write(
        self,
        endpoint: ServedEndpoint,
        role: str,
        version: str,
        status: int,
        shape: Shape,
        clock: Clock,
        ttft_s: float = 0.0,
    ) -> None:
        self.records.add(
            RequestRecord(
                ts=clock.unix,
                endpoint=endpoint.spec.slug,
                version_id=version,
                role=role,
                isl=shape.isl,
                osl=shape.osl,
                cached_tokens=shape.cached_tokens,
                ttft_s=ttft_s,
                e2el_s=clock.elapsed(),
                status=status,
            )
        )

    async def _first_bytes(
        self, endpoint: ServedEndpoint, path: str, body: bytes, pinned: str, clock: Clock
    ) -> Exchange:
        """The first server's answer that can go to the client: whole, or of a stream the first bytes."""
        role, trouble = pinned, "no server answered"
        for _ in range(TRIES):
            server = endpoint.choose(role)
            if server is None:
                raise ApiError(404, f"endpoint {endpoint.spec.slug!r} has no {role} version now", "x-polymorph-role")
            canary = server.role == CANARY and not pinned
            if not await server.wait_ready(0 if canary else WAIT_S - clock.elapsed()):
                trouble = server.error or f"the {server.role} server is {server.state}"
            else:
                try:
                    exchange = await self._ask(server, path, body, clock.elapsed())
                    if not (canary and exchange.reply.status >= 500):
                        return exchange
                    trouble = f"the canary answered {exchange.reply.status}"
                    exchange.close()
                except upstream.UpstreamDied as error:
                    trouble = str(error)
                    await server.suspect()
            if canary:
                self._write(endpoint, CANARY, server.version.version_id, 502, Shape(), clock)
            self.records.retries.labels(endpoint.spec.slug, server.role).inc()
            role = pinned or STABLE
        self._write(endpoint, role, "", 503, Shape(), clock)
        raise ApiError(503, f"{endpoint.spec.slug} cannot answer now: {trouble}", code="no_server")

    async def _ask(self, server: ApiServer, path: str, body: bytes, waited_s: float) -> Exchange:
        reply = await upstream.send(server.port, "POST", path, body, {"x-polymorph-shape": "1"})
        exchange = Exchange(server, reply, waited_s)
        try:
            await reply.head()
            exchange.first = await (reply.read() if exchange.streams else reply.read_all())
            return exchange
        except BaseException:
            exchange.close()
            raise


class Clock:
    """Seconds since a request came in, and when that was."""

    def __init__(self) -> None:
        self.unix, self._start = time.time(), time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start


class Relay(Response):
    """Passes a stream of server-sent events on, whole events at a time, and records its shape at its end."""

    def __init__(self, proxy: Proxy, endpoint: ServedEndpoint, exchange: Exchange, clock: Clock) -> None:
        super().__init__(status_code=exchange.reply.status, headers=_headers(exchange))
        del self.headers["content-length"]
        self._proxy, self._endpoint, self._exchange, self._clock = proxy, endpoint, exchange, clock
        self._ttft_s = clock.elapsed()
        self._held = b""
        self._shape = Shape()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, exchange = self.status_code, self._exchange
        watch = asyncio.create_task(_close_with(receive, exchange))
        try:
            await send({"type": "http.response.start", "status": status, "headers": self.raw_headers})
            data = exchange.first
            while data:
                if whole := self._whole_events(data):
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
                data = await exchange.reply.read()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except upstream.UpstreamDied as error:
            status = 499 if watch.done() else 502
            body = sse(ApiError(502, f"the answer broke off: {error}", code="engine_restarted").body())
            await send({"type": "http.response.body", "body": body, "more_body": False})
        except OSError:
            status = 499
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            watch.cancel()
            exchange.close()
            self._proxy.record(self._endpoint, exchange, status, self._shape, self._clock, self._ttft_s)

    def _whole_events(self, data: bytes) -> bytes:
        """`data` up to its last whole event, without the comment that tells the shape."""
        data = self._held + data
        end = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        data, self._held = data[:end], data[end:]
        start = 0 if data.startswith(b": shape ") else data.find(b"\n: shape ") + 1
        if start or data.startswith(b": shape "):
            stop = data.index(b"\n\n", start)
            self._shape = _read_shape(data[start + len(b": shape ") : stop])
            data = data[:start] + data[stop + 2 :]
        return data


def _read_shape(raw: bytes) -> Shape:
    return msgspec.json.decode(raw, type=Shape)


def _headers(exchange: Exchange) -> dict[str, str]:
    kept = {name: exchange.reply.headers[name] for name in PASSED_ON if name in exchange.reply.headers}
    return kept | ({"cache-control": "no-cache"} if exchange.streams else {})


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _close_with(receive: Any, exchange: Exchange) -> None:
    """Ends the connection to the server when the client has gone, which aborts the generation."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.reply.close()
