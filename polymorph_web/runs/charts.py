"""A run's rows -> an info NamedTuple (the data, testable) -> a Plotly figure -> a `Chart`.

Rows are records as JSON (`optimizer.records`). The report's charts are in `report_charts`, the endpoint's in
`endpoints.charts`. Seconds come in, milliseconds only leave on axes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from optimizer.records import MEASURED
from polymorph_web.ui import figures as fig
from polymorph_web.ui.figures import BASELINE, WINNER, Chart, Figure

Row = Mapping[str, Any]


class Point(NamedTuple):
    """One measured experiment. `order` counts measured experiments from 1."""

    order: int
    artifact_hash: str
    name: str
    focus: str
    mechanism: str
    tier: int
    state: str
    ratio: float
    low: float
    high: float
    predicted: float | None


class Progress(NamedTuple):
    points: list[Point]
    best: list[tuple[int, float]]  # (order, best whole-model ratio so far), one entry per improvement


def progress_info(experiments: Iterable[Row]) -> Progress:
    """Every experiment with a ratio, in the order measured; only whole-model ratios move the best-so-far line."""
    found: list[Point] = []
    best: list[tuple[int, float]] = []
    for row in experiments:
        if row.get("ratio") is None:
            continue
        point = _point(len(found) + 1, row)
        found.append(point)
        counts = point.tier >= 2 and point.state in ("keep", "marginal")
        if counts and point.ratio > max(1.0, best[-1][1] if best else 1.0):
            best.append((point.order, point.ratio))
    return Progress(found, best)


def _point(order: int, row: Row) -> Point:
    ratio = float(row["ratio"])
    low, high = row.get("ci_low"), row.get("ci_high")
    return Point(
        order,
        row["artifact_hash"],
        row.get("name") or row["artifact_hash"][:8],
        row.get("focus") or "other",
        row.get("mechanism") or "",
        int(row["tier"]),
        str(row["state"]),
        ratio,
        ratio if low is None else float(low),
        ratio if high is None else float(high),
        row.get("predicted"),
    )


HOVER = (
    "<b>%{customdata[0]}</b><br>%{y:.3f}× [%{customdata[1]:.3f}, %{customdata[2]:.3f}]"
    "<br>tier %{customdata[3]} · %{customdata[4]}<extra>%{fullData.name}</extra>"
)


def progress_figure(info: Progress) -> Figure:
    traces = [_focus_trace(focus, info.points) for focus in (*fig.FOCI, "other")]
    steps = [(0, 1.0), *info.best]
    if info.points:
        steps.append((info.points[-1].order, steps[-1][1]))
    best = fig.line("best so far", [s[0] for s in steps], [s[1] for s in steps], WINNER, shape="hv", hoverinfo="skip")
    shape, label = fig.level(1.0, "baseline")
    return {
        "data": [best, *traces],
        "layout": fig.layout(
            fig.axis("experiment", rangemode="tozero", tickformat="d", autorangeoptions={"include": [0, 6]}),
            fig.axis("speed over baseline (×)"),
            shapes=[shape],
            annotations=[label],
        ),
    }


def _focus_trace(focus: str, all_points: Sequence[Point]) -> dict[str, Any]:
    """Hollow markers for tier 1 (a few layers), filled for the whole model."""
    known = [p for p in all_points if (p.focus if p.focus in fig.FOCI else "other") == focus]
    trace = fig.points(
        focus,
        [p.order for p in known],
        [p.ratio for p in known],
        fig.color(focus),
        fig.symbol(focus),
        customdata=[[p.name, p.low, p.high, p.tier, p.state, p.artifact_hash] for p in known],
        hovertemplate=HOVER,
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [p.high - p.ratio for p in known],
            "arrayminus": [p.ratio - p.low for p in known],
            "color": fig.color(focus, 0.45),
            "thickness": 1,
            "width": 0,
        },
        showlegend=bool(known),
    )
    trace["marker"]["symbol"] = [marker_symbol(p.focus, p.tier) for p in known]
    trace["marker"]["line"] = {"width": 1.5, "color": fig.color(focus)}
    return trace


def marker_symbol(focus: str, tier: int) -> str:
    return fig.symbol(focus) + ("-open" if tier == 1 else "")


def progress_chart(experiments: Iterable[Row]) -> Chart:
    info = progress_info(experiments)
    return Chart(
        "progress",
        "Search progress",
        "Hollow markers are tier 1 (a few layers), filled ones the whole model; bars are 95% intervals.",
        progress_figure(info),
        (
            "experiment",
            "candidate",
            "focus",
            "mechanism",
            "tier",
            "verdict",
            "ratio (×)",
            "95% low (×)",
            "95% high (×)",
        ),
        tuple(
            (p.order, p.name, p.focus, p.mechanism, p.tier, p.state, _r(p.ratio), _r(p.low), _r(p.high))
            for p in info.points
        ),
        size="tall",
    )


class Tradeoff(NamedTuple):
    """Whole-model experiments: (name, focus, interactivity tok/s/user, output tok/s)."""

    points: list[tuple[str, str, float, float]]


def tradeoff_info(experiments: Iterable[Row]) -> Tradeoff:
    found = []
    for row in experiments:
        metrics = row.get("metrics") or {}
        x, y = metrics.get("interactivity"), metrics.get("output_tput")
        if row.get("ratio") is not None and x is not None and y is not None:
            found.append((row.get("name") or row["artifact_hash"][:8], row.get("focus") or "other", float(x), float(y)))
    return Tradeoff(found)


def tradeoff_figure(info: Tradeoff) -> Figure:
    traces = []
    for focus in dict.fromkeys(p[1] for p in info.points):
        mine = [p for p in info.points if p[1] == focus]
        traces.append(
            fig.points(
                focus,
                [p[2] for p in mine],
                [p[3] for p in mine],
                fig.color(focus),
                fig.symbol(focus),
                size=9,
                text=[p[0] for p in mine],
                hovertemplate="<b>%{text}</b><br>%{y:.1f} tok/s · %{x:.1f} tok/s/user<extra></extra>",
            )
        )
    return {
        "data": traces,
        "layout": fig.layout(fig.axis("interactivity (tok/s/user)"), fig.axis("output throughput (tok/s)")),
    }


def tradeoff_chart(experiments: Iterable[Row]) -> Chart:
    info = tradeoff_info(experiments)
    return Chart(
        "tradeoff",
        "Throughput and interactivity",
        "Whole-model candidates; up and to the right is better.",
        tradeoff_figure(info) if info.points else None,
        ("candidate", "focus", "interactivity (tok/s/user)", "output throughput (tok/s)"),
        tuple((n, f, _r(x), _r(y)) for n, f, x, y in info.points),
        empty="No whole-model candidate has been measured yet.",
    )


Prediction = tuple[str, str, int, float, float]  # name, focus, tier, predicted ratio, measured ratio


def predictions_info(experiments: Iterable[Row]) -> list[Prediction]:
    """Measured candidates that were predicted first. A program that came back was no longer foreseen."""
    once = (e for e in experiments if e["state"] in MEASURED and e.get("visit", 1) == 1)
    measured = [p for p in progress_info(once).points if p.predicted is not None]
    return [(p.name, p.focus, p.tier, float(p.predicted or 0), p.ratio) for p in measured]


def predictions_figure(found: Sequence[Prediction]) -> Figure:
    traces = []
    for focus in dict.fromkeys(p[1] for p in found):
        mine = [p for p in found if p[1] == focus]
        trace = fig.points(
            focus,
            [p[3] for p in mine],
            [p[4] for p in mine],
            fig.color(focus),
            fig.symbol(focus),
            text=[p[0] for p in mine],
            hovertemplate="<b>%{text}</b><br>predicted %{x:.2f}×, measured %{y:.2f}×<extra></extra>",
        )
        trace["marker"]["symbol"] = [marker_symbol(p[1], p[2]) for p in mine]
        trace["marker"]["line"] = {"width": 1.5, "color": fig.color(focus)}
        traces.append(trace)
    ends = [v for p in found for v in p[3:5]] or [1.0]
    low, high = min(ends) * 0.95, max(ends) * 1.05
    traces.append(fig.line("measured as predicted", [low, high], [low, high], BASELINE, dash="dot", hoverinfo="skip"))
    return {"data": traces, "layout": fig.layout(fig.axis("predicted speed (×)"), fig.axis("measured speed (×)"))}


def predictions_words(experiments: Iterable[Row]) -> list[str]:
    """How far predictions have been off so far, a sentence for each tier."""
    found: dict[int, list[float]] = {}
    for _, _, tier, predicted, ratio in predictions_info(experiments):
        found.setdefault(tier, []).append(predicted / ratio - 1)
    return [
        f"{TIERS[tier]}: off by {statistics.median(abs(e) for e in off):.0%} at the median so far; "
        f"{sum(e > 0 for e in off)} of {len(off)} measured slower than predicted."
        for tier, off in sorted(found.items())
    ]


def predictions_chart(experiments: Iterable[Row]) -> Chart:
    found = predictions_info(experiments)
    return Chart(
        "predictions",
        "Predicted and measured",
        "How well the cost model foresaw each measurement; on the line it was right.",
        predictions_figure(found) if found else None,
        ("candidate", "focus", "tier", "predicted (×)", "measured (×)"),
        tuple((n, f, t, _r(p), _r(m)) for n, f, t, p, m in found),
        empty="No prediction has been measured yet.",
    )


class Repeats(NamedTuple):
    """Paired ratios of each measurement, in the order taken: (label, samples)."""

    groups: list[tuple[str, list[float]]]


TIERS = {1: "Tier 1, few layers", 2: "Tier 2, whole model", 3: "End to end, HTTP"}


def repeats_info(experiments: Iterable[Row]) -> Repeats:
    groups = []
    for row in experiments:
        samples = [float(s) for s in row.get("samples") or [] if s is not None]
        if samples:
            groups.append((TIERS.get(int(row["tier"]), f"Tier {row['tier']}"), samples))
    return Repeats(groups)


def repeats_figure(info: Repeats) -> Figure:
    data = [
        {
            "type": "box",
            "name": label,
            "y": samples,
            "boxpoints": "all",
            "jitter": 0.5,
            "pointpos": 0,
            "marker": {"color": WINNER, "size": 5, "opacity": 0.65},
            "line": {"width": 1.25, "color": "var(--text-2)"},
            "fillcolor": f"{WINNER}/0.10",
            "hovertemplate": "%{y:.4f}×<extra>" + label + "</extra>",
        }
        for label, samples in info.groups
    ]
    shape, note = fig.level(1.0, "baseline")
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis(""), fig.axis("paired ratio (×)"), legend=False, shapes=[shape], annotations=[note]
        ),
    }


def repeats_chart(experiments: Iterable[Row]) -> Chart:
    info = repeats_info(experiments)
    return Chart(
        "repeats",
        "Raw repeats",
        "Each dot is one interleaved pair: the candidate's speed over the other side's.",
        repeats_figure(info) if info.groups else None,
        ("measurement", "pair", "ratio (×)"),
        tuple((label, i, _r(s)) for label, samples in info.groups for i, s in enumerate(samples, 1)),
        empty="This candidate was never timed: it did not pass the checks that come before timing.",
    )


def _r(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(float(value), digits)
