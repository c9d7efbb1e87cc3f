"""How many programs an hour the search measures on the demo, and where its time goes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from optimizer.agents import make_agents
from optimizer.records import Experiment, State
from tests.bench import search_gain, searching
from tests.bench.figures import Figure
from tests.bench.searching import Points, Slow

SEARCH_S = 300.0
LEAST_UTILISATION = 0.9


def rate(data: Path, found: dict[str, float]) -> list[Figure]:
    """Ours: the built-in agents, points of the kernel's parameters, and an agent that takes 20 s a thought."""
    thinker = Slow(seed=1)
    ledger, _, seconds = searching.search(data, SEARCH_S, [*make_agents(0), Points(), thinker])
    search_gain.keep(ledger, seconds)
    counts = ledger.counts()
    found["rate"] = counts["distinct_behaviours"] * 3600 / seconds
    first = [e for e in ledger.experiments.values() if e.tier == 1 and e.state is not State.FAILED]
    found["width"] = statistics.median(math.log(e.paired_high / e.paired_low) / 2 for e in first if e.samples)
    lost = [Figure(f"lost: {item['why']}", item["seconds"], "s") for item in ledger.time_lost()]
    return [
        Figure("seconds searched", seconds, "s"),
        Figure("behaviour-distinct programs, checks passed in tier 1", counts["distinct_behaviours"], "programs"),
        Figure("those an hour", found["rate"], "programs/h"),
        Figure("on all layers (tier 2)", counts["tier2"], "candidates"),
        Figure("failed", counts["failed"], "candidates"),
        Figure("duplicates, not measured", counts["duplicates"], "candidates"),
        Figure("came back for more pairs", sum(e.visit > 1 for e in first), "visits"),
        Figure("pairs of a visit, mean", mean_pairs(first), "pairs"),
        Figure("half a tier-1 interval, median", 100 * math.expm1(found["width"]), "%"),
        Figure("timed blocks taken again: other work overlapped", ledger.disturbed, "blocks"),
        Figure("best so far over the baseline, tier 2", ledger.best_ratio, "x"),
        Figure("utilisation beside an agent that takes 20 s a thought", ledger.utilisation, "", LEAST_UTILISATION),
        Figure("thoughts that agent had", thinker.thoughts, "thoughts"),
        *lost,
    ]


def mean_pairs(first: Sequence[Experiment]) -> float:
    return statistics.mean([len(e.samples) for e in first if e.visit == 1 and e.samples] or [0])
