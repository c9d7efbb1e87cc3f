"""A clock that moves when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Whoever sleeps on it, in a thread, wakes when it has come so far. `yield_s`: real time for whoever wakes to take note."""

    def __init__(self, yield_s: float = 0.0) -> None:
        self.now, self.yield_s, self._moved = 0.0, yield_s, threading.Condition()
        self.on_move: list[Callable[[float], None]] = []  # told the seconds in which nothing was timed

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float, timed: bool = False) -> None:
        with self._moved:
            self.now += seconds
            self._moved.notify_all()
        for tell in self.on_move if not timed else ():
            tell(seconds)
        if self.yield_s:
            time.sleep(self.yield_s)

    def sleep(self, seconds: float) -> None:
        with self._moved:
            end = self.now + seconds
            self._moved.wait_for(lambda: self.now >= end)
