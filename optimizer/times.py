"""Where a run's time goes, by its own clock: the engine's work on candidates, and what was lost to what."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Quiet:
    """Held while something is timed: the heartbeat waits for it, and what works in the background is suspended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.on_hold: list[Callable[[], None]] = []
        self.on_release: list[Callable[[], None]] = []

    def acquire(self, timeout: float = -1) -> bool:
        """Without suspending anybody: for what must not run beside a timed block."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        for suspend in self.on_hold:
            suspend()

    def __exit__(self, *exc: object) -> None:
        for go_on in self.on_release:
            go_on()
        self._lock.release()


class Times:
    """Seconds of this attempt, but for `lost` and `stage_s`, which go on from what an earlier one had. `clock` may be virtual."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.quiet = Quiet()
        self.lost: dict[str, float] = defaultdict(float)
        self.stage_s: dict[str, float] = defaultdict(float)  # of `optimizer.accounting.STAGES`
        self.busy_s = 0.0  # in which the engine worked on candidates: loading, checking, timing
        self.disturbed = 0  # timed blocks that other work overlapped and that were taken again
        self._searching_since: float | None = None
        self._search_s = 0.0  # that the search took, once it has ended

    @contextmanager
    def losing(self, why: str) -> Iterator[None]:
        """Time inside is the engines' idle time, booked under `why`."""
        start = self.clock()
        try:
            yield
        finally:
            self.lost[why] += self.clock() - start

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Time inside is what utilisation is a share of."""
        self._searching_since = self.clock()
        try:
            yield
        finally:
            self._search_s, self._searching_since = self.clock() - self._searching_since, None

    @contextmanager
    def working(self, stage: str) -> Iterator[None]:
        """Time inside the engine works on a candidate: loads, checks or times it."""
        start = self.clock()
        try:
            with self.stage(stage):
                yield
        finally:
            self.busy_s += self.clock() - start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time inside is booked to this stage of the run."""
        start = self.clock()
        try:
            yield
        finally:
            self.stage_s[name] += self.clock() - start

    def spent(self) -> dict[str, dict[str, float]]:
        """What the next attempt goes on from."""
        return {"stages": dict(self.stage_s), "lost": dict(self.lost)}

    def go_on_from(self, spent: dict[str, dict[str, float]]) -> None:
        for held, earlier in ((self.stage_s, spent.get("stages")), (self.lost, spent.get("lost"))):
            for name, seconds in (earlier or {}).items():
                held[name] += seconds

    @property
    def utilisation(self) -> float:
        """Share of the search's wall time, this attempt, in which the engine worked on candidates."""
        since = self._searching_since
        whole = self._search_s if since is None else self.clock() - since
        return min(1.0, self.busy_s / whole) if whole > 0 else 0.0

    def time_lost(self) -> list[dict[str, Any]]:
        ordered = sorted(self.lost.items(), key=lambda item: -item[1])
        return [{"why": why, "seconds": round(seconds, 2)} for why, seconds in ordered]
