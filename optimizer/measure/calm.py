"""Timed blocks that other work overlapped are taken again: the kernel says how long the host's threads waited for a core.

A host that waits for its turn is not slow. How often that happened is counted and told. What is left of a bad moment is taken
again; on a machine that is busy all the time that would be no use, so undisturbed blocks have to earn what repeats cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.client import HostClient

WAIT_SHARE = 0.06  # of a block's time, waited for a core by the threads of the host together
MOST_REPEATS = 4  # that may have been earned
EARNED = 0.5  # repeats, by a block that was not disturbed


@dataclass
class Calm:
    """Times calls to a host. `repeated` counts the blocks that were taken again."""

    host: HostClient
    repeated: int = 0
    earned: float = MOST_REPEATS

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of `call` and what it gave, from its last run."""
        while True:
            waited = waiting_s(self.host.pid)
            start = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - start
            if waiting_s(self.host.pid) - waited <= WAIT_SHARE * seconds:
                self.earned = min(MOST_REPEATS, self.earned + EARNED)
                return seconds, result
            if self.earned < 1:
                return seconds, result
            self.earned -= 1
            self.repeated += 1


def waiting_s(pid: int) -> float:
    """Seconds that threads of the process were ready to run and had no core; 0 where the system does not tell."""
    total = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return total / 1e9
