"""The thread that steps an engine for an asyncio server. Commands go in between steps, events come out by the step.

It owns the host: starts it, and when the host ends, for whatever reason and also while idle, starts it again and has
the requests that were running computed on. A request fails only when it was running as two hosts ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.artifacts import Artifact
from engine.client import HostClient, HostFailure
from engine.core import Engine
from engine.sequence import GenerationRequest, InvalidRequest, TokenEvent
from engine.wire import HostStatus, Status

log = logging.getLogger(__name__)
RESTART_PAUSES_S = (0.0, 0.5, 2.0, 5.0, 10.0)
SWITCH_INTERVAL_S = 0.0005  # how long the event loop may keep the engine's thread from its next step
STATUS_TIMEOUT_S = 30.0
T = TypeVar("T")


class EngineRunner:
    """Methods are called from the event loop's thread; everything of the engine happens in the runner's own thread."""

    def __init__(self, host: HostClient, artifact: Artifact, loop: asyncio.AbstractEventLoop, **engine: Any) -> None:
        self._host, self._loop = host, loop
        self._commands: queue.SimpleQueue[Callable[[Engine], object] | None] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Queue[TokenEvent | None]] = {}
        self._closing = threading.Event()
        self._started: Future[None] = Future()
        # the host dies with the thread that started it, so the thread that starts it is the one that lasts
        self._thread = threading.Thread(target=self._run, args=(artifact, engine), name="engine", daemon=True)
        self.engine: Engine | None = None
        self.healthy = False
        self.restarts = 0
        self.error = ""

    async def start(self) -> None:
        """Starts the host and opens the first version. Raises HostFailure."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        await asyncio.wrap_future(self._started)
        self._watch()

    async def close(self) -> None:
        """Ends the host. Requests in flight get no more events."""
        self._closing.set()
        self._commands.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, 10)
        await asyncio.to_thread(self._host.close)

    @property
    def limit(self) -> int:
        """Tokens a new request may have, prompt and answer together."""
        assert self.engine is not None
        return self.engine.lanes[-1].limit

    @property
    def stats(self) -> dict[str, float]:
        counts = self.engine.stats() if self.engine else {}
        return counts | {"host_restarts": self.restarts}

    @property
    def unfinished(self) -> int:
        return len(self._streams)

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for a request that can never run."""
        assert self.engine is not None
        self.engine.validate(request)

    def submit(self, request: GenerationRequest, events: asyncio.Queue[TokenEvent | None]) -> None:
        """Queues a request; its events arrive in `events`, the last one with a finish reason."""
        self._streams[request.id] = events
        self._commands.put(lambda engine: self._add(engine, request))

    def abort(self, request_id: int) -> None:
        """Ends a request at once. No further event of it arrives."""
        if self._streams.pop(request_id, None) is not None:
            self._commands.put(lambda engine: engine.abort(request_id))

    async def swap(self, artifact: Artifact, policy: str, deadline_s: float) -> float:
        """Seconds the swap took. Raises HostFailure, with the version unchanged."""
        return await self._ask(lambda engine: engine.swap(artifact, policy, deadline_s))

    async def host_status(self) -> HostStatus:
        def ask(engine: Engine) -> HostStatus:
            status = engine.host.call(Status(), STATUS_TIMEOUT_S)
            assert isinstance(status, HostStatus)
            return status

        return await self._ask(ask)

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        answer: Future[T] = Future()

        def command(engine: Engine) -> None:
            try:
                answer.set_result(question(engine))
            except Exception as error:
                answer.set_exception(error)
                if isinstance(error, HostFailure) and error.fatal:
                    raise

        self._commands.put(command)
        return await asyncio.wrap_future(answer)

    def _watch(self) -> None:
        """Has the event loop notice the end of the host, so that an idle one is restarted too."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self._host.pid)
            self._loop.add_reader(descriptor, self._host_ended, descriptor)

    def _host_ended(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self._commands.put(_require_host)

    # -- the runner's own thread ------------------------------------------------------------------------------------

    def _run(self, artifact: Artifact, options: dict[str, Any]) -> None:
        try:
            self._host.start()
            self.engine = Engine(self._host, artifact, **options)
        except BaseException as error:
            self._started.set_exception(error)
            return
        self.healthy = True
        self._started.set_result(None)
        while True:
            try:
                if not self._work(self.engine):
                    return
            except HostFailure as failure:
                if self._closing.is_set():
                    return
                self._mend(self.engine, failure)
            except Exception as error:  # a fault of ours: the requests in flight are told, the server goes on
                log.exception("engine thread")
                reason = f"the server failed on this request ({type(error).__name__})"
                self._deliver(self.engine.fail_all(reason, "engine_failed"))

    def _work(self, engine: Engine) -> bool:
        """Commands that are due, then one step. False when told to end. Waits while there is nothing to do."""
        while not engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command(engine)
        self._deliver(engine.step())
        return True

    def _add(self, engine: Engine, request: GenerationRequest) -> None:
        try:
            engine.add(request)
        except InvalidRequest as error:
            refusal = TokenEvent(request.id, -1, "", finish_reason="error", error=str(error), error_code="refused")
            self._deliver([refusal])

    def _mend(self, engine: Engine, failure: HostFailure) -> None:
        """A fatal failure restarts the host; any other ends the requests of the step that the host refused."""
        log.error("engine host: %s %s\n%s", failure.code, failure.message, failure.log_tail)
        if not failure.fatal and self._host.alive:
            self._deliver(engine.fail_step(failure.message))
            return
        self.healthy, self.error = False, failure.message
        attempt = 0
        while not self._closing.wait(RESTART_PAUSES_S[min(attempt, len(RESTART_PAUSES_S) - 1)]):
            attempt += 1
            try:
                self._host.restart()
                self._deliver(engine.recover())
            except HostFailure as again:
                log.error("engine host, restart %d: %s %s", attempt, again.code, again.message)
                self._deliver(engine.fail_all(f"the engine ended and could not be restarted: {again.message}"))
                continue
            self.restarts += 1
            self.healthy, self.error = True, ""
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._watch)
            return

    def _deliver(self, events: list[TokenEvent]) -> None:
        """One wake-up of the event loop a step, however many tokens it made."""
        if events:
            with contextlib.suppress(RuntimeError):  # the loop is closing: nobody listens any more
                self._loop.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.put_nowait(event)
            if event.finish_reason:
                del self._streams[event.request_id]


def _require_host(engine: Engine) -> None:
    if not engine.host.alive:
        raise HostFailure("host_exited", "The engine host ended while it was idle.", "Its log says why.", fatal=True)
