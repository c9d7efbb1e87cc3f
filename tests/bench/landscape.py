"""Search quality: our agents against random search and Optuna's TPE over the same space, with the same budget and the same rules.

    make bench NAME=landscape                       everything, some ten minutes
    python -m tests.landscape.record                records the landscape on this machine
    python -m tests.bench.landscape replays live    parts alone

Replays run on a record (tests/landscape) whose programs were measured once: this machine's, else the one in tests/data. Live
searches compile and measure.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from engine.models.config import ModelConfig, read_config
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.cost.pruning import prune_moments
from optimizer.measure.tiers import Rule
from tests import paths
from tests.bench import figures, searching
from tests.bench.figures import Figure
from tests.landscape import record
from tests.landscape.replay import ABLATIONS, OURS, RANDOM, TPE, Contender, Replayed, replay
from tests.landscape.table import KEPT, PATH, Landscape

SEEDS, BUDGET_S = 10, 120.0
SHARES = (0.25, 0.5, 1.0)  # of the budget
NEAR = 0.95  # of the landscape's best
PRUNED_SEARCHES, LOST = 50, 0.02
LIVE_S, LIVE_SEED = 60.0, 1
LIVE_ROUNDS = 10  # of the winners in turns, at the end
LIVE = paths.ROOT / "build" / "landscape-live.json"
RIVALS = (RANDOM, TPE)


def run(parts: Sequence[str] = ()) -> list[Figure]:
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return [figure for name in parts or PARTS for figure in PARTS[name]()]


@cache
def recorded() -> Landscape:
    """This machine's record, or the one that is kept with the tests."""
    return Landscape.read(PATH if PATH.is_file() else KEPT)


def model() -> ModelConfig:
    return read_config(paths.demo_model())


# replays


def replays() -> list[Figure]:
    land = recorded()
    found = {c.name: many(c, range(SEEDS)) for c in (OURS, *RIVALS, *ABLATIONS)}
    best = max(land.rows, key=lambda n: land.speed(n, 2) if land.rows[n].first else 0.0)
    rows = [
        Figure("programs recorded", len(land.rows), "programs"),
        Figure("recorded on all layers too", sum(bool(r.second) for r in land.rows.values()), "programs"),
        Figure("recorded on", f"{land.about['machine']['cpu']}, {land.about['date']}", ""),
        Figure(f"best of all: {best}", land.best, "x"),
    ]
    goals = {
        (share, of): max(of(r.best(share) for r in found[c.name]) for c in RIVALS) for share in SHARES for of in OF
    }
    for contender in (OURS, *RIVALS, *ABLATIONS):
        rows += of_searches(contender, found[contender.name], land, goals if contender is OURS else {})
    return rows


OF: dict[Callable, str] = {statistics.median: "median", min: "worst"}


def of_searches(
    contender: Contender, found: Sequence[Replayed], land: Landscape, goals: dict[tuple[float, Callable], float]
) -> list[Figure]:
    """Best confirmed speed at shares of the budget, and when `NEAR` of the best was reached. `goals`: the better rival's."""
    rows = []
    for share in SHARES:
        for of, word in OF.items():
            title = f"{contender.name}: best confirmed at {share:.0%} of {BUDGET_S:.0f} s, {word} of {len(found)}"
            rows.append(Figure(title, of(r.best(share) for r in found), "x", goals.get((share, of))))
    times = [r.reached(NEAR * land.best) for r in found]
    late = sum(t == float("inf") for t in times)
    rows.append(
        Figure(
            f"{contender.name}: seconds to {NEAR:.0%} of the best, median ({late} never)", statistics.median(times), "s"
        )
    )
    tiers = [statistics.mean(r.counts[tier] for r in found) for tier in ("tier1", "tier2")]
    rows.append(Figure(f"{contender.name}: measured at tier 1, tier 2", f"{tiers[0]:.1f}, {tiers[1]:.1f}", "programs"))
    return rows


def many(contender: Contender, seeds: Sequence[int], budget_s: float = BUDGET_S) -> list[Replayed]:
    land, config = recorded(), model()
    with tempfile.TemporaryDirectory() as folder:
        return [replay(land, config, contender, seed, budget_s, Path(folder)) for seed in seeds]


# pruning


def pruning() -> list[Figure]:
    """What the worse half, as the cost model predicts it when a program's turn comes, would have cost these searches."""
    searches = many(OURS, range(100, 100 + PRUNED_SEARCHES))
    rows = []
    for word, moments in (("prediction", [r.pruning for r in searches]), ("upper end", [r.cautious for r in searches])):
        found = prune_moments(moments, noise=recorded().about["noise"])
        title = f"pruning the worse half by {word}"
        lost = f"{title} loses the winner, of {found.searches} searches"
        rows += [
            Figure(lost, found.lost_share, "share", LOST, "at most"),
            Figure(f"{title}: programs pruned", found.pruned, "share"),
            Figure(f"{title}: of the winner's speed kept, mean", found.gain_kept, "x"),
        ]
    return rows


# live


def live() -> list[Figure]:
    winners = {contender.name: live_search(contender) for contender in (OURS, *RIVALS)}
    return live_figures(winners, live_speeds(list(winners.values())))


def live_search(contender: Contender, seconds: float = LIVE_S) -> str:
    """The program confirmed as the best after so many seconds, in a data folder that holds no build yet."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        if (record.DATA / "ceilings.json").is_file():
            shutil.copy(record.DATA / "ceilings.json", data / "ceilings.json")
        _, session, _ = searching.search(data, seconds, contender.agents(LIVE_SEED), contender.adapt)
        best = session.trials.incumbent
        return best.candidate.name if best else "baseline"


def live_speeds(names: Sequence[str]) -> dict[str, float]:
    """Over the baseline on all layers and the traffic, one winner after the other in one process."""
    with searching.demo_lab(record.DATA, 600) as (_, _, lab):
        lab.two.rule = Rule(0.0, looks=(LIVE_ROUNDS,), limit_s=60.0)
        speeds = {}
        for name in {*names} - {"baseline"}:
            proposal = searching.as_proposal(Program.parse(name))
            artifact = Builder(record.DATA).build(replace(proposal, id=name)).artifact
            speeds[name] = lab.two.measure(artifact, None).ratio.ratio
            lab.two.keep()
        return speeds | {"baseline": 1.0}


def live_figures(winners: dict[str, str], speeds: dict[str, float]) -> list[Figure]:
    LIVE.parent.mkdir(parents=True, exist_ok=True)
    LIVE.write_text(json.dumps({"winners": winners, "speeds": speeds}))
    rival = max(speeds[winners[c.name]] for c in RIVALS)
    return [
        Figure(f"{c}, live, {LIVE_S:.0f} s: {name}", speeds[name], "x", rival if c == OURS.name else None)
        for c, name in winners.items()
    ]


PARTS: dict[str, Callable[[], list[Figure]]] = {"replays": replays, "pruning": pruning, "live": live}

if __name__ == "__main__":
    print(figures.write("landscape", run(sys.argv[1:])))
