"""Loops that take one candidate after the other, each with a server that is started for it, and how long one takes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from engine.artifacts import Artifact
from optimizer.agents.programs.program import Program
from optimizer.lab import Scene
from optimizer.measure.end_to_end import MIN_PAIRS
from optimizer.measure.load import LoadRequest, Target, run_closed_loop
from optimizer.measure.servers import ServerSpec, api_server
from tests import paths
from tests.bench import searching, vllm_server
from tests.bench.figures import Figure
from tests.bench.searching import PART, built

PEERS = Path(os.environ.get("POLYMORPH_PEERS", "/nonexistent"))
USERS = 4  # of the demo's traffic
REQUESTS = MIN_PAIRS * USERS  # of the tier-2 workload: as many windows as a decision over HTTP takes of one side at least
COLD_STARTS = 2


def workload(data: Path) -> list[LoadRequest]:
    """Requests of the demo's search window."""
    scene = Scene.of(searching.config_of(data, 600))
    return [LoadRequest(w.prompt, w.osl) for w in scene.requests(REQUESTS, 11)]


def one_by_one(data: Path, found: dict[str, float]) -> list[Figure]:
    """Our own engine server restarted for each candidate: seconds from its start to the workload's end."""
    artifact, requests = built(data, Program.of([PART])), workload(data)
    spec = ServerSpec(paths.demo_model(), threads=0, name="demo")
    cold, loads = timed_loop(lambda: served(spec, artifact, data), requests, "demo", 2 * COLD_STARTS)
    found["ours"], found["our cold"] = (
        statistics.median(c + w for c, w in zip(cold, loads, strict=True)),
        statistics.median(cold),
    )
    return loop_figures("our server", cold, loads, 0.0)


def status_quo(data: Path, found: dict[str, float]) -> list[Figure]:
    """An agent thinks 20 s (stated), vLLM restarts, the workload runs over HTTP."""
    requests = workload(data)
    cold, loads = timed_loop(lambda: vllm_server.started(PEERS), requests, "smol", COLD_STARTS)
    if not cold:
        return [Figure("vLLM", "missing", "", "installed under POLYMORPH_PEERS", "equal")]
    found["vllm cold"] = statistics.median(cold)
    found["vllm"] = searching.THOUGHT_S + statistics.median(c + w for c, w in zip(cold, loads, strict=True))
    return loop_figures("vLLM", cold, loads, searching.THOUGHT_S)


def timed_loop(
    start: Callable[[], AbstractContextManager[str | None]], requests: list[LoadRequest], model: str, times: int
) -> tuple[list[float], list[float]]:
    """Cold starts and workloads in seconds; empty when the server does not come up."""
    cold, loads = [], []
    for _ in range(times):
        begun = time.monotonic()
        with start() as url:
            if url is None:
                return [], []
            cold.append(time.monotonic() - begun)
            result = run_closed_loop(Target(url, model), requests, USERS)
            assert not result.failed, result.failed[0].error
            loads.append(result.duration_s)
    return cold, loads


@contextmanager
def served(spec: ServerSpec, artifact: Artifact, data: Path) -> Iterator[str]:
    with api_server(spec, artifact.path, "ours", data / "logs") as server:
        yield server.url


def loop_figures(name: str, cold: list[float], loads: list[float], thought_s: float) -> list[Figure]:
    whole = thought_s + statistics.median(c + w for c, w in zip(cold, loads, strict=True))
    return [
        Figure(f"{name}: cold start to serving", statistics.median(cold), "s"),
        Figure(f"{name}: tier-2 workload, {REQUESTS} requests, {USERS} users", statistics.median(loads), "s"),
        Figure(f"{name}: one candidate after the other", 3600 / whole, "candidates/h"),
    ]
