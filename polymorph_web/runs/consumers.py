"""The socket of a live run: everything after the client's last seq, then what comes. A reconnect loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import parse_qs

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import Http404

from polymorph_web.accounts.access import get_run
from polymorph_web.accounts.models import User
from polymorph_web.runs.store import DjangoRunStore, group_name

TAIL_S = 0.4  # how often the log is read where no other process can ring
RECHECK_S = 15.0  # how often sign-in and membership are looked at again
GONE = 4404


class RunConsumer(AsyncJsonWebsocketConsumer):
    async def connect(self) -> None:
        self.run_id = self.scope["url_route"]["kwargs"]["run_id"]
        self.wake = asyncio.Event()
        self.tail: asyncio.Task[None] | None = None
        await self.accept()
        if not await self.allowed():
            await self.close(GONE)
            return
        query = parse_qs(self.scope["query_string"].decode())
        after = query.get("after", ["0"])[0]
        self.last = int(after) if after.isdigit() else 0
        if settings.CHANNEL_REDIS_URL:
            await self.channel_layer.group_add(group_name(self.run_id), self.channel_name)
        self.tail = asyncio.create_task(self.follow())

    async def disconnect(self, code: int) -> None:
        if self.tail is not None:
            self.tail.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.tail
        if settings.CHANNEL_REDIS_URL:
            await self.channel_layer.group_discard(group_name(self.run_id), self.channel_name)

    async def run_wake(self, message: dict[str, Any]) -> None:
        self.wake.set()

    async def follow(self) -> None:
        """Sends events as they appear; looks at sign-in and membership again now and then."""
        loop = asyncio.get_running_loop()
        checked = loop.time()
        while True:
            events = await database_sync_to_async(DjangoRunStore().events)(str(self.run_id), self.last, 500)
            for event in events:
                await self.send_json(event)
                self.last = event["seq"]
            if loop.time() - checked > RECHECK_S:
                checked = loop.time()
                if not await self.allowed():
                    await self.close(GONE)
                    return
            if not events:
                with contextlib.suppress(TimeoutError):
                    # not wait_for: Python 3.11's loses a cancellation that meets a ring
                    async with asyncio.timeout(5.0 if settings.CHANNEL_REDIS_URL else TAIL_S):
                        await self.wake.wait()
                self.wake.clear()

    @database_sync_to_async
    def allowed(self) -> bool:
        session = self.scope.get("session")
        if session is None or not session.exists(session.session_key or ""):  # signed out in another tab
            return False
        user = User.objects.filter(pk=self.scope["user"].pk, is_active=True).first() if self.scope.get("user") else None
        if user is None:
            return False
        try:
            get_run(user, self.run_id)
        except (Http404, PermissionDenied):
            return False
        return True
