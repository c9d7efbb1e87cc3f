"""The thread that steps an engine for an asyncio server. Commands go in between steps, events come out a step at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.artifacts import Artifact
from engine.client import HostClient, HostFailure
from engine.core import Engine
from engine.sequence import GenerationRequest, InvalidRequest, TokenEvent

log = logging.getLogger(__name__)
RESTART_PAUSES_S = (0.0, 0.5, 2.0, 5.0, 10.0)


class EngineRunner:
    """Owns the host and the engine. Methods are called from the event loop's thread."""

    def __init__(self, host: HostClient, artifact: Artifact, loop: asyncio.AbstractEventLoop, **engine: Any) -> None:
        self._host, self._artifact, self._loop, self._options = host, artifact, loop, engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Queue[TokenEvent]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.engine: Engine | None = None
        self.healthy = False
        self.restarts = 0
        self.error = ""

    def start(self) -> None:
        """Starts the host and opens the first version; raises HostFailure when it cannot."""
        self._host.start()
        self.engine = Engine(self._host, self._artifact, **self._options)
        self.healthy = True
        self._thread.start()

    def close(self) -> None:
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(10)
        self._host.close()

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for a request that can never run."""
        if self.engine is not None:
            self.engine.validate(request)

    def submit(self, request: GenerationRequest, events: asyncio.Queue[TokenEvent]) -> None:
        """Queues a request; its events arrive in `events`, the last one with a finish reason."""
        self._streams[request.id] = events
        self._commands.put(lambda: self._add(request))

    def abort(self, request_id: int) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._commands.put(lambda: self.engine is not None and self.engine.abort(request_id) and None)

    async def swap(self, artifact: Artifact, policy: str, deadline_s: float) -> float:
        """Seconds the swap took. Raises HostFailure, with the version unchanged."""

        def run(engine: Engine) -> float:
            seconds = engine.swap(artifact, policy, deadline_s)
            self._artifact = artifact
            return seconds

        return float(await self._ask(run))

    async def host_status(self) -> Any:
        from engine.wire import Status

        return await self._ask(lambda engine: engine.host.call(Status(), 30))

    async def _ask(self, question: Callable[[Engine], Any]) -> Any:
        answer: Future[Any] = Future()

        def command() -> None:
            try:
                if self.engine is None:
                    raise HostFailure("restarting", "The engine is restarting.", "Try again in a moment.")
                answer.set_result(question(self.engine))
            except Exception as error:
                answer.set_exception(error)
                if isinstance(error, HostFailure) and error.fatal:
                    raise

        self._commands.put(command)
        return await asyncio.wrap_future(answer)

    def _add(self, request: GenerationRequest) -> None:
        try:
            if self.engine is None:
                raise InvalidRequest("the engine is restarting; send the request again")
            self.engine.add(request)
        except InvalidRequest as error:
            self._deliver([TokenEvent(request.id, -1, "", finish_reason="error", error=str(error))])

    def _run(self) -> None:
        while True:
            try:
                if not self._work():
                    return
            except HostFailure as failure:
                self._recover(failure)

    def _work(self) -> bool:
        """Commands that are due, then one step. False when told to end."""
        engine = self.engine
        assert engine is not None
        while not engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        self._deliver(engine.step())
        return True

    def _recover(self, failure: HostFailure) -> None:
        """A fatal failure restarts the host; any other ends the requests of the step's lane with its message."""
        assert self.engine is not None
        log.error("engine: %s %s", failure.code, failure.message)
        if not failure.fatal and self._host.alive:
            self._deliver(self._end_all(failure))
            return
        self.healthy, self.error = False, failure.message
        for pause in (*RESTART_PAUSES_S, *[RESTART_PAUSES_S[-1]] * 1000):
            time.sleep(pause)
            with contextlib.suppress(HostFailure):
                self._host.restart()
                self._deliver(self.engine.reset(self._artifact))
                break
        self.restarts += 1
        self.healthy, self.error = True, ""

    def _end_all(self, failure: HostFailure) -> list[TokenEvent]:
        assert self.engine is not None
        events = []
        for lane in self.engine.lanes:
            for request_id in list(lane.sequences):
                self.engine.abort(request_id)
                events.append(TokenEvent(request_id, -1, lane.artifact.hash, finish_reason="error", error=failure.message))
        return events

    def _deliver(self, events: list[TokenEvent]) -> None:
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
