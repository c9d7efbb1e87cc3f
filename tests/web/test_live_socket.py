"""The socket of a live run: nothing is lost, strangers are closed out, at connecting and later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session

from optimizer.store import Lease
from polymorph_web.accounts.models import Membership, User
from polymorph_web.asgi import application
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs import consumers
from polymorph_web.runs.models import Run
from polymorph_web.runs.store import DjangoRunStore
from tests.web import runs

WAIT_S = 10  # for a message that must come
QUIET_S = 0.05  # for one that must not, after others came


class Socket(ApplicationCommunicator):
    """A browser's end of a websocket, without a network."""

    def __init__(self, path: str, query: str, headers: list[tuple[bytes, bytes]]) -> None:
        scope = {"type": "websocket", "path": path, "query_string": query.encode(), "headers": headers}
        super().__init__(application, scope | {"subprotocols": []})

    async def connect(self) -> str:
        """What the server answers: accept or close."""
        await self.send_input({"type": "websocket.connect"})
        return str((await self.receive_output(WAIT_S))["type"]).removeprefix("websocket.")

    async def event(self) -> dict[str, Any]:
        message = await self.receive_output(WAIT_S)
        assert message["type"] == "websocket.send", message
        return dict(json.loads(message["text"]))

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(WAIT_S)


Connect = Callable[..., Awaitable[Socket]]


def cookie_of(user: User) -> str:
    session = SessionStore()
    session[SESSION_KEY], session[HASH_SESSION_KEY] = str(user.pk), user.get_session_auth_hash()
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


@pytest.fixture
def held(transactional_db: None, endpoint: Endpoint, people: dict[str, User]) -> tuple[Run, Lease]:
    """A running run with five events."""
    run = runs.queued_run(endpoint, people["member"])
    lease = DjangoRunStore().claim(str(run.id), "worker", 600)
    assert lease
    for n in range(1, 6):
        DjangoRunStore().append_event(lease, "log", {"text": f"line {n}"})
    return run, lease


@pytest.fixture
async def connect(held: tuple[Run, Lease], people: dict[str, User]) -> AsyncIterator[Connect]:
    """Opens the socket as somebody."""
    opened: list[Socket] = []

    async def connect(name: str, query: str = "") -> Socket:
        headers = [(b"host", b"testserver"), (b"origin", b"http://testserver")]
        if name != "anonymous":
            headers.append((b"cookie", (await database_sync_to_async(cookie_of)(people[name])).encode()))
        socket = Socket(f"/ws/runs/{held[0].id}/", query, headers)
        assert await socket.connect() == "accept"
        opened.append(socket)
        return socket

    yield connect
    for socket in opened:
        await socket.disconnect()


async def append(lease: Lease, text: str) -> int:
    return await database_sync_to_async(DjangoRunStore().append_event)(lease, "log", {"text": text})


async def received(socket: Socket, n: int) -> list[int]:
    return [(await socket.event())["seq"] for _ in range(n)]


async def closed_with(socket: Socket) -> int:
    """The code of the close, past the events that were on the way."""
    while True:
        message = await socket.receive_output(timeout=WAIT_S)
        if message["type"] == "websocket.close":
            return int(message["code"])


@pytest.mark.parametrize(("query", "expected"), [("", [1, 2, 3, 4, 5]), ("after=3", [4, 5]), ("after=x", [1, 2])])
async def test_it_sends_what_came_after_the_number(connect: Connect, query: str, expected: list[int]) -> None:
    socket = await connect("viewer", query)
    assert await received(socket, len(expected)) == expected


async def test_it_goes_on_with_what_comes(connect: Connect, held: tuple[Run, Lease]) -> None:
    socket = await connect("viewer", "after=5")
    await append(held[1], "new")
    event = await socket.event()
    assert (event["seq"], event["kind"], event["payload"]) == (6, "log", {"text": "new"})
    assert await socket.receive_nothing(timeout=QUIET_S), "each event comes once"


async def test_a_reconnect_loses_nothing_and_repeats_nothing(connect: Connect, held: tuple[Run, Lease]) -> None:
    first = await connect("viewer", "after=0")
    seen = await received(first, 5)
    await first.disconnect()
    for n in range(3):
        await append(held[1], f"while away {n}")
    second = await connect("viewer", f"after={seen[-1]}")
    await append(held[1], "once back")
    assert seen + await received(second, 4) == list(range(1, 10))


async def test_a_ring_at_the_moment_of_leaving_does_not_hold_the_socket(held: tuple[Run, Lease]) -> None:
    class Wake(asyncio.Event):
        waited_for = asyncio.Event()

        async def wait(self) -> Any:
            self.waited_for.set()
            return await super().wait()

    consumer = consumers.RunConsumer()
    consumer.run_id, consumer.last, consumer.wake = held[0].id, 5, Wake()
    tail = asyncio.create_task(consumer.follow())
    await asyncio.wait_for(Wake.waited_for.wait(), WAIT_S)
    consumer.wake.set()
    tail.cancel()
    done, _ = await asyncio.wait({tail}, timeout=WAIT_S)
    assert tail in done and tail.cancelled()


async def test_many_watch_one_run(connect: Connect, held: tuple[Run, Lease]) -> None:
    sockets = [await connect(name, "after=5") for name in ("viewer", "member", "admin")]
    await append(held[1], "for all")
    assert await asyncio.gather(*(received(s, 1) for s in sockets)) == [[6], [6], [6]]


async def test_more_events_than_a_read_come_in_order(connect: Connect, held: tuple[Run, Lease]) -> None:
    def many() -> None:
        for n in range(500):
            DjangoRunStore().append_event(held[1], "log", {"n": n})

    await database_sync_to_async(many)()
    socket = await connect("viewer")
    assert await received(socket, 505) == list(range(1, 506))


@pytest.mark.parametrize("name", ["stranger", "loner", "anonymous"])
async def test_a_stranger_is_closed_out_with_nothing_told(connect: Connect, name: str) -> None:
    socket = await connect(name)
    message = await socket.receive_output(timeout=WAIT_S)
    assert (message["type"], message["code"]) == ("websocket.close", 4404)


async def test_staff_may_watch(connect: Connect) -> None:
    assert await received(await connect("staff"), 2) == [1, 2]


async def test_a_page_of_another_site_cannot_listen(held: tuple[Run, Lease], people: dict[str, User]) -> None:
    cookie = await database_sync_to_async(cookie_of)(people["viewer"])
    headers = [(b"host", b"testserver"), (b"origin", b"http://evil.example"), (b"cookie", cookie.encode())]
    assert await Socket(f"/ws/runs/{held[0].id}/", "", headers).connect() == "close"


async def remove(people: dict[str, User]) -> None:
    await database_sync_to_async(Membership.objects.filter(user=people["viewer"]).delete)()


async def deactivate(people: dict[str, User]) -> None:
    await database_sync_to_async(User.objects.filter(username="viewer").update)(is_active=False)


async def sign_out(people: dict[str, User]) -> None:
    await database_sync_to_async(Session.objects.all().delete)()


@pytest.mark.parametrize("how", [remove, deactivate, sign_out])
async def test_who_loses_access_is_closed_out_later(
    connect: Connect,
    held: tuple[Run, Lease],
    people: Any,
    how: Callable[..., Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_S", -1.0)
    socket = await connect("viewer")
    assert await received(socket, 5) == [1, 2, 3, 4, 5]
    await how(people)
    await append(held[1], "wakes the socket, which looks again")
    assert await closed_with(socket) == 4404
