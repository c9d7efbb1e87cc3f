"""Loops that take one candidate after the other, each with a server that is started for it, and how long one takes.

A loop's workload is what tier 2 replays: requests of the traffic's search window, sampled as the traffic says, by as many users.
It is played as often as its candidates need for an interval as narrow as tier 1's, judged by how much equal windows of one
server scatter here (the spread between servers, builds and warm-up are left out, which favours the loop).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.artifacts import Artifact
from optimizer.agents.programs.program import Program
from optimizer.lab import Scene
from optimizer.measure.end_to_end import MIN_PAIRS
from optimizer.measure.load import LoadRequest, Target, run_closed_loop
from optimizer.measure.servers import ServerSpec, api_server
from optimizer.traffic.prompts import prompt_ids
from tests import paths
from tests.bench import searching, vllm_server
from tests.bench.figures import Figure
from tests.bench.searching import PART, built

PEERS = Path(os.environ.get("POLYMORPH_PEERS", "/nonexistent"))
USERS = 4  # of the demo's traffic
REQUESTS = MIN_PAIRS * USERS  # of a window: as many tokens as tier 2 has a candidate make, and more
WINDOWS = 4  # of each server; the first warms it
COLD_STARTS = 2
TIER_ONE_WIDTH = 0.15  # half an interval, on the log scale, where the search was not measured
NORMAL = 1.96  # standard errors of half a 95% interval

Start = Callable[[], AbstractContextManager[str | None]]


@dataclass
class Loop:
    """What was measured of one. Seconds."""

    name: str
    thought_s: float = 0.0
    cold: list[float] = field(default_factory=list)
    windows: list[list[float]] = field(default_factory=list)  # by server, in order; the first of each warmed it

    @property
    def window_s(self) -> float:
        return statistics.median(s for row in self.windows for s in row[1:])

    @property
    def scatter(self) -> float:
        """Standard deviation of a window's logarithm within a server."""
        return math.sqrt(statistics.mean(float(np.log(row[1:]).var(ddof=1)) for row in self.windows))

    def passes(self, width: float) -> int:
        """Windows that each of two versions needs for the ratio of their means to be known to `width` either way."""
        return max(1, math.ceil(2 * (NORMAL * self.scatter / width) ** 2))

    def candidate_s(self, width: float) -> float:
        return self.thought_s + statistics.median(self.cold) + self.passes(width) * self.window_s

    def figures(self, width: float) -> list[Figure]:
        sure = math.expm1(NORMAL * self.scatter * math.sqrt(2 / self.passes(width)))
        thought = [Figure(f"{self.name}: thinking (assumed)", self.thought_s, "s")] if self.thought_s else []
        return [
            *thought,
            Figure(f"{self.name}: cold start to serving", statistics.median(self.cold), "s"),
            Figure(f"{self.name}: tier-2 workload, {REQUESTS} requests, {USERS} users", self.window_s, "s"),
            Figure(f"{self.name}: times it is played for tier 1's interval", self.passes(width), "windows"),
            Figure(f"{self.name}: half the interval that this gives", 100 * sure, "%"),
            Figure(f"{self.name}: one candidate after the other", 3600 / self.candidate_s(width), "candidates/h"),
        ]


def one_by_one(data: Path, found: dict[str, float]) -> list[Figure]:
    """Our own engine server restarted for each candidate, nobody thinking."""
    artifact = built(data, Program.of([PART]))
    spec = ServerSpec(paths.demo_model(), threads=0, name="demo")
    loop = timed(Loop("our server"), lambda: served(spec, artifact, data), data, "demo", 2 * COLD_STARTS)
    return told(loop, "ours", found)


def status_quo(data: Path, found: dict[str, float]) -> list[Figure]:
    """An agent thinks 20 s (stated), vLLM restarts, the workload runs over HTTP."""
    loop = Loop("vLLM", searching.THOUGHT_S)
    timed(loop, lambda: vllm_server.started(PEERS), data, "smol", COLD_STARTS)
    if not loop.cold:
        return [Figure("vLLM", "missing", "", "installed under POLYMORPH_PEERS", "equal")]
    return told(loop, "vllm", found)


def told(loop: Loop, name: str, found: dict[str, float]) -> list[Figure]:
    width = found.get("width", TIER_ONE_WIDTH)
    found[name], found[f"{name} cold"] = loop.candidate_s(width), statistics.median(loop.cold)
    return loop.figures(width)


def timed(loop: Loop, start: Start, data: Path, model: str, times: int) -> Loop:
    """The loop with its cold starts and windows; without any when the server does not come up."""
    for server in range(times):
        begun = time.monotonic()
        with start() as url:
            if url is None:
                return loop
            loop.cold.append(time.monotonic() - begun)
            loop.windows.append([window(url, model, workload(data, 100 * server + i)) for i in range(WINDOWS)])
    return loop


def window(url: str, model: str, requests: list[LoadRequest]) -> float:
    result = run_closed_loop(Target(url, model), requests, USERS)
    assert not result.failed, result.failed[0].error
    return result.duration_s


def workload(data: Path, seed: int) -> list[LoadRequest]:
    """Requests of the demo's search window; every seed gives the same lengths with other text."""
    scene = Scene.of(searching.config_of(data, 600))
    shapes = scene.searched.sample(REQUESTS, 11, "search", scene.config.max_position_embeddings)
    return [
        LoadRequest(prompt_ids(s, f"{seed}:{i}", scene.text), s.osl, sampling=s.sampling())
        for i, s in enumerate(shapes)
    ]


@contextmanager
def served(spec: ServerSpec, artifact: Artifact, data: Path) -> Iterator[str]:
    with api_server(spec, artifact.path, "ours", data / "logs") as server:
        yield server.url
