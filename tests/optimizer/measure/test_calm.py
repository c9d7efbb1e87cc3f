"""Blocks that other work overlapped are taken again, as long as undisturbed ones pay for it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from optimizer.measure import calm
from optimizer.measure.calm import EARNED, MOST_REPEATS, Calm, waiting_s


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Calm:
    """Its host waits an hour for a core in every block of `disturbed`."""
    timer = Calm(SimpleNamespace(pid=1))  # type: ignore[arg-type]
    asked = [0, 0.0]

    def waiting(pid: int) -> float:
        asked[0] += 1
        if asked[0] % 2 == 0 and disturbed.pop(0):
            asked[1] += 3600.0
        return asked[1]

    disturbed.clear()
    monkeypatch.setattr(calm, "waiting_s", waiting)
    return timer


disturbed: list[bool] = []


def test_a_disturbed_block_is_taken_again(timer: Calm) -> None:
    disturbed.extend([True, True, False])
    results = iter(range(9))
    assert timer.timed(lambda: next(results))[1] == 2 and timer.repeated == 2


def test_on_a_machine_that_is_never_calm_blocks_count_as_they_come(timer: Calm) -> None:
    disturbed.extend([True] * 50)
    results = iter(range(99))
    for _ in range(20):
        timer.timed(lambda: next(results))
    assert next(results) == 20 + MOST_REPEATS and timer.repeated == MOST_REPEATS
    disturbed[:] = [False] * round(1 / EARNED) + [True, False]
    for _ in range(round(1 / EARNED) + 1):
        timer.timed(lambda: next(results))
    assert timer.repeated == MOST_REPEATS + 1, "calm blocks have earned another"


def test_the_kernel_says_how_long_threads_waited() -> None:
    assert waiting_s(os.getpid()) >= 0.0 and waiting_s(1 << 30) == 0.0
