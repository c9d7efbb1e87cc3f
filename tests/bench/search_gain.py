"""Best confirmed gain against time: the search as it ran, and a restart loop over the very programs that it took, in its order.

The loop is not run: a program takes as long as one candidate of it was measured to take, and gives what it gave here. That
favours the loop, which is spared duplicates, failures and builds, and handed the order that the search's cost model chose.
Beside it stands the loop with the same programs shuffled, the median of SHUFFLES.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimizer.ledger import Ledger
from optimizer.records import MEASURED, State
from tests.bench.figures import Figure
from tests.paths import ROOT

FOLDER = ROOT / "build" / "bench"
PLOTLY = "../../static/vendor/plotly/plotly-cartesian.min.js"
HOUR_S = 3600.0
SHUFFLES = 200
Steps = list[tuple[float, float]]  # (seconds since the start, best gain from then on)


@dataclass(frozen=True, slots=True)
class Taken:
    """A distinct program that passed its checks. `gain`: over the baseline, confirmed on all layers; 1 where none was."""

    name: str
    first_s: float  # measured in tier 1, since the search began
    confirmed_s: float  # when the gain was known
    gain: float


def recorded(ledger: Ledger) -> list[Taken]:
    """The programs of a search in the order they were measured, duplicates and failures left out."""
    events = ledger.store.events(ledger.config.run_id, limit=1_000_000)
    began = next(e["at"] for e in events if e["kind"] == "proposal")
    found: dict[str, Taken] = {}
    for event in (e for e in events if e["kind"] == "experiment"):
        row, at = event["payload"], event["at"] - began
        if State(row["state"]) not in MEASURED:
            continue
        held = found.setdefault(row["artifact_hash"], Taken(row["name"], at, at, 1.0))
        if row["tier"] == 2 and row["leads"]:
            found[row["artifact_hash"]] = Taken(held.name, held.first_s, at, float(row["ratio"]))
    return list(found.values())


def keep(ledger: Ledger, seconds: float) -> None:
    """Writes what `gain` draws."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = {"seconds": seconds, "programs": [asdict(t) for t in recorded(ledger)]}
    (FOLDER / "search_run.json").write_text(json.dumps(rows, indent=1))


def gain(data: Path, found: dict[str, float]) -> list[Figure]:
    path = FOLDER / "search_run.json"
    loops = {
        title: found[k] for k, title in (("vllm", "vLLM restarted"), ("ours", "our server restarted")) if k in found
    }
    if not path.exists() or not loops:
        return [Figure("best gain against time", "needs the parts rate and status_quo or one_by_one before it", "")]
    run = json.loads(path.read_text())
    programs, seconds = [Taken(**row) for row in run["programs"]], float(run["seconds"])
    ours = best_so_far([(t.confirmed_s, t.gain) for t in programs])
    lines = {f"ours, measured for {seconds:.0f} s": [*(s for s in ours if s[0] <= seconds), (seconds, ours[-1][1])]}
    for title, cycle in loops.items():
        lines[f"{title}, one in {cycle:.0f} s (simulated)"] = until(HOUR_S, looped(programs, cycle))
    written = draw(lines)
    words = [
        Figure("ours: best confirmed gain", ours[-1][1], "x"),
        Figure("ours: after", _reaches(ours, ours[-1][1]), "s"),
    ]
    for title, cycle in loops.items():
        words += in_words(title, programs, cycle, ours[-1][1])
    return [*words, Figure("drawn", str(written.relative_to(ROOT)), "")]


def in_words(title: str, programs: Sequence[Taken], cycle: float, target: float) -> list[Figure]:
    shuffled = [looped(random.Random(i).sample(programs, len(programs)), cycle) for i in range(SHUFFLES)]
    reached = [_reaches(steps, target) for steps in shuffled]
    return [
        Figure(f"{title}: programs in an hour", HOUR_S / cycle, "programs"),
        Figure(f"{title}: best after an hour, in our order", until(HOUR_S, looped(programs, cycle))[-1][1], "x"),
        Figure(
            f"{title}: best after an hour, shuffled", statistics.median(until(HOUR_S, s)[-1][1] for s in shuffled), "x"
        ),
        Figure(f"{title}: our best after, in our order", _reaches(looped(programs, cycle), target), "s"),
        Figure(f"{title}: our best after, shuffled", statistics.median(reached), "s"),
    ]


def looped(programs: Sequence[Taken], cycle: float) -> Steps:
    return best_so_far([((i + 1) * cycle, t.gain) for i, t in enumerate(programs)])


def best_so_far(known: Sequence[tuple[float, float]]) -> Steps:
    steps: Steps = [(0.0, 1.0)]
    for at, value in sorted(known):
        if value > steps[-1][1]:
            steps.append((at, value))
    return steps


def until(end: float, steps: Steps) -> Steps:
    held = [s for s in steps if s[0] <= end]
    return [*held, (end, held[-1][1])]


def _reaches(steps: Steps, target: float) -> float:
    return next(at for at, best in steps if best == target)


def draw(lines: dict[str, Steps]) -> Path:
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": name, "line": {"shape": "hv"},
         "x": [round(at / 60, 3) for at, _ in steps], "y": [round(best, 4) for _, best in steps]}
        for name, steps in lines.items()
    ]  # fmt: skip
    layout = {
        "title": {"text": "Best confirmed gain against time"},
        "xaxis": {"title": {"text": "minutes"}, "range": [0, HOUR_S / 60]},
        "yaxis": {"title": {"text": "speed over the baseline (x)"}},
        "legend": {"orientation": "h"},
    }
    figure = json.dumps({"data": traces, "layout": layout})
    page = (
        "<!doctype html><meta charset=utf-8><title>Best confirmed gain against time</title>"
        f'<div id=plot style="height:90vh"></div><script src="{PLOTLY}"></script>'
        f'<script>const figure = {figure}; Plotly.newPlot("plot", figure.data, figure.layout);</script>\n'
    )
    (FOLDER / "search_gain.json").write_text(figure)
    path = FOLDER / "search_gain.html"
    path.write_text(page)
    return path
