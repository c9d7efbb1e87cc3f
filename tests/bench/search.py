"""Experiments an hour of the search on the demo, beside loops that take one candidate after the other on the same machine.

    make bench NAME=search                    everything, under 20 minutes
    python -m tests.bench.search rate swaps   parts alone

Counted are programs of distinct behaviour whose checks passed in tier 1; those on all layers are shown apart. A loop's rate is
3,600 over the seconds of one candidate, each part of which is measured here, but for the 20 s of thinking, which are stated.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench import figures, swap
from tests.bench.figures import Figure
from tests.bench.search_gain import gain
from tests.bench.search_loops import one_by_one, status_quo
from tests.bench.search_noise import disturbance, false_wins
from tests.bench.search_rate import rate

GOALS = {"vllm": 252.0, "ours": 40.0, "swap": 52.0}


def run(parts: Sequence[str] = ()) -> list[Figure]:
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    found: dict[str, float] = {}
    rows: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in parts or PARTS:
            start = time.monotonic()
            rows += PARTS[name](Path(folder), found)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return rows + ratios(found)


def ratios(found: dict[str, float]) -> list[Figure]:
    """What needs figures of several parts; left out where one is missing."""
    rows = []
    if "rate" in found:
        for loop, title in (("vllm", "thinking 20 s and vLLM restarted"), ("ours", "our server restarted")):
            if loop in found:
                ratio = found["rate"] * found[loop] / 3600
                rows.append(Figure(f"experiments an hour over {title}, tier-2 workload", ratio, "x", GOALS[loop]))
    kinds = [k for k in found if k.startswith("swap ")]
    for cold, title, goal in (("vllm cold", "vLLM's", GOALS["swap"]), ("our cold", "our own", None)):
        if cold in found:
            rows += [Figure(f"{title} cold start over {k}", found[cold] / found[k], "x", goal) for k in kinds]
    return rows


def swaps(data: Path, found: dict[str, float]) -> list[Figure]:
    times = {kind: statistics.median(seconds) for kind, seconds in swap.by_kind(data).items()}
    found |= {f"swap {kind}": seconds for kind, seconds in times.items()}
    return [Figure(f"hot swap, {kind}", seconds, "s", swap.GOALS[kind], "at most") for kind, seconds in times.items()]


PARTS: dict[str, Callable[[Path, dict[str, float]], list[Figure]]] = {
    "rate": rate,
    "one_by_one": one_by_one,
    "status_quo": status_quo,
    "gain": gain,
    "swaps": swaps,
    "disturbance": disturbance,
    "false_wins": false_wins,
}

if __name__ == "__main__":
    print(figures.write("search", run(sys.argv[1:])))
