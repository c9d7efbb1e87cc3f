"""One version answering traffic through the scheduler that serves, a slice at a time. The clock is ours."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, replace

from engine.artifacts import Artifact
from engine.client import HostClient
from engine.core import Engine
from engine.sequence import GenerationRequest, SamplingParams
from engine.wire import Loaded, Unload

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Work:
    """One request of the traffic: its prompt, how many tokens it is answered with, how they are drawn.

    It is made before anybody knows which version answers it, its seed as well: every side draws with the same numbers.
    """

    prompt: tuple[int, ...]
    osl: int
    sampling: SamplingParams = GREEDY


class Replay:
    """A closed loop at fixed concurrency over a list of requests that starts again at its end."""

    def __init__(self, host: HostClient, artifact: Artifact, kv_bytes: int) -> None:
        self.host, self.artifact = host, artifact
        self.engine = Engine(host, artifact, kv_bytes=kv_bytes)
        self._decode_steps: list[
            tuple[float, float]
        ] = []  # seconds, and tokens a request, of steps that decoded for all
        self._drafts_before = (0, 0)
        self._next_id = 0
        self._concurrency = 0
        self._waiting: deque[Work] = deque()
        self._running: dict[int, int] = {}  # request id -> tokens it still gets

    @property
    def loaded(self) -> Loaded:
        return self.engine.lanes[-1].loaded

    @property
    def fastest_step_s(self) -> float:
        return min((seconds for seconds, _ in self._decode_steps), default=float("inf"))

    @property
    def interactivity(self) -> float:
        """Tokens a second that a user sees: the median step that decoded for all requests in flight; 0 without one.

        With drafts such a step makes more than a token a request, on average over those steps.
        """
        if not self._decode_steps:
            return 0.0
        seconds, tokens = zip(*self._decode_steps, strict=True)
        return statistics.mean(tokens) / statistics.median(seconds)

    @property
    def accepted_share(self) -> float | None:
        """Of the drafts since the restart, how many held; None without any."""
        drafted, accepted = (n - b for n, b in zip(self._drafts(), self._drafts_before, strict=True))
        return accepted / drafted if drafted else None

    def _drafts(self) -> tuple[int, int]:
        return self.engine.drafted_tokens, self.engine.accepted_tokens

    def restart(self, requests: list[Work], concurrency: int) -> None:
        """Begins anew, untimed up to the first token of every request in flight.

        The first requests are cut to even fractions of their answers: the loop is in its steady state from the start.
        """
        for request_id in list(self._running):
            self.engine.abort(request_id)
        self._running.clear()
        self._concurrency = concurrency
        first = [replace(r, osl=max(1, r.osl * (i + 1) // concurrency)) for i, r in enumerate(requests[:concurrency])]
        self._waiting = deque([*first, *requests[concurrency:]])
        self._decode_steps, self._drafts_before = [], self._drafts()
        started: set[int] = set()
        self._admit()
        flight = set(self._running)
        while flight - started:
            started |= {event.request_id for event in self._step()}

    def advance(self, tokens: int) -> float:
        """Seconds for `tokens` output tokens, scaled from the whole steps that made at least so many."""
        made, start = 0, time.perf_counter()
        while made < tokens:
            made += len(self._step())
        return (time.perf_counter() - start) * tokens / made

    def unload(self) -> None:
        self.host.call(Unload(self.artifact.hash))

    def _step(self) -> list:
        self._admit()
        begin, flight = time.perf_counter(), len(self._running)
        events = self.engine.step()
        if len({event.request_id for event in events}) == flight:
            self._decode_steps.append((time.perf_counter() - begin, len(events) / flight))
        for event in events:
            if event.finish_reason:
                del self._running[event.request_id]
        return events

    def _admit(self) -> None:
        while len(self._running) < self._concurrency:
            work = self._waiting.popleft()
            self._waiting.append(work)
            self._next_id += 1
            self.engine.add(GenerationRequest(self._next_id, list(work.prompt), work.osl, work.sampling))
            self._running[self._next_id] = work.osl
