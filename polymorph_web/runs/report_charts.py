"""The before/after page's charts: parts of `report.json` -> info -> figure -> `Chart`. Seconds in, milliseconds on axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from polymorph_web.ui import figures as fig
from polymorph_web.ui.figures import BASELINE, WINNER, Chart, Figure

Report = Mapping[str, Any]
SIDES = (("baseline", "Baseline", BASELINE, "dot"), ("winner", "Optimised", WINNER, "solid"))


class Curve(NamedTuple):
    """One side of the concurrency sweep; lists run together. Bounds are None where no interval was measured."""

    conc: list[int]
    output_tput: list[float]
    low: list[float | None]
    high: list[float | None]
    interactivity: list[float | None]
    p95_ttft: list[float | None]


class Sweep(NamedTuple):
    baseline: Curve
    winner: Curve


def sweep_info(report: Report) -> Sweep:
    rows = sorted(report.get("by_concurrency") or [], key=lambda r: r["conc"])

    def curve(side: str) -> Curve:
        mine = [(int(r["conc"]), r[side]) for r in rows if (r.get(side) or {}).get("output_tput") is not None]
        get = [[m.get(k) for _, m in mine] for k in ("output_tput", "ci_low", "ci_high", "interactivity", "p95_ttft")]
        return Curve([c for c, _ in mine], *get)

    return Sweep(curve("baseline"), curve("winner"))


def sweep_figure(info: Sweep) -> Figure:
    data = []
    for side, name, tone, dash in SIDES:
        c: Curve = getattr(info, side)
        bounded = [i for i in range(len(c.conc)) if c.low[i] is not None and c.high[i] is not None]
        if bounded:
            data.append(
                fig.band([c.conc[i] for i in bounded], [c.low[i] for i in bounded], [c.high[i] for i in bounded], tone)
            )
        data.append(
            fig.line(
                name,
                c.conc,
                c.output_tput,
                tone,
                dash=dash,
                mode="lines+markers",
                marker={"size": 7, "symbol": _symbol(side)},
                hovertemplate="%{y:.1f} tok/s at concurrency %{x}<extra>" + name + "</extra>",
            )
        )
    ticks = sorted({*info.baseline.conc, *info.winner.conc})
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis("concurrency (requests in flight)", type="log", tickvals=ticks, ticktext=[str(t) for t in ticks]),
            fig.axis("output throughput (tok/s)", rangemode="tozero"),
        ),
    }


def by_concurrency(report: Report) -> Chart:
    info = sweep_info(report)
    return Chart(
        "throughput",
        "Throughput by concurrency",
        "Output tokens per second; the bands are 95% intervals.",
        sweep_figure(info) if info.baseline.conc else None,
        (
            "side",
            "concurrency",
            "output (tok/s)",
            "95% low (tok/s)",
            "95% high (tok/s)",
            "interactivity (tok/s/user)",
            "p95 TTFT (s)",
        ),
        tuple(
            (name, *(_r(v) for v in row)) for side, name, *_ in SIDES for row in zip(*getattr(info, side), strict=True)
        ),
        empty="The concurrency sweep was not measured for this run.",
    )


class Frontier(NamedTuple):
    sweep: Sweep
    min_interactivity: float | None  # the SLO's, tokens/s/user
    max_ttft: float | None  # the SLO's, seconds
    recommended: Mapping[str, Any] | None = None  # the point of the report that is advised


def frontier_info(report: Report, slo: Mapping[str, Any]) -> Frontier:
    tpot, ttft = slo.get("tpot_s"), slo.get("ttft_s")
    limits = (1 / float(tpot) if tpot else None, float(ttft) if ttft else None)
    return Frontier(sweep_info(report), *limits, report.get("recommended"))


def frontier_figure(info: Frontier) -> Figure:
    data = []
    for side, name, tone, dash in SIDES:
        c: Curve = getattr(info.sweep, side)
        data.append(
            fig.line(
                name,
                c.interactivity,
                c.output_tput,
                tone,
                dash=dash,
                mode="lines+markers+text",
                marker={"size": 8, "symbol": _symbol(side)},
                text=[str(v) for v in c.conc],
                textposition="top center",
                cliponaxis=False,
                textfont={"size": 10, "color": "var(--text-2)"},
                hovertemplate="%{y:.1f} tok/s · %{x:.1f} tok/s/user at concurrency %{text}<extra>" + name + "</extra>",
            )
        )
    if info.recommended and info.recommended.get("interactivity"):
        x, y = info.recommended["interactivity"], info.recommended["output_tput"]
        hover = "%{y:.1f} tok/s · %{x:.1f} tok/s/user<extra>recommended</extra>"
        data.append(fig.points("Recommended", [x], [y], WINNER, "star-open", size=18, hovertemplate=hover))
    shapes, notes = [], []
    if info.min_interactivity:
        shapes.append(
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": info.min_interactivity,
                "x1": _reach(info),
                "y0": 0,
                "y1": 1,
                "fillcolor": "var(--c-ok)/0.07",
                "line": {"width": 0},
                "layer": "below",
            }
        )
        notes.append(
            {
                "xref": "x",
                "yref": "paper",
                "x": info.min_interactivity,
                "y": 0.02,
                "xanchor": "left",
                "yanchor": "bottom",
                "text": f" meets the SLO: {info.min_interactivity:.0f} tok/s/user or more",
                "showarrow": False,
                "font": {"size": 11, "color": "var(--c-ok)"},
            }
        )
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis("interactivity, 1/TPOT (tok/s/user)", rangemode="tozero"),
            fig.axis("output throughput (tok/s)", rangemode="tozero"),
            shapes=shapes,
            annotations=notes,
        ),
    }


def _reach(info: Frontier) -> float:
    known = [v for c in info.sweep for v in c.interactivity if v is not None]
    return 1.12 * max([*known, info.min_interactivity or 0.0])


def frontier(report: Report, slo: Mapping[str, Any]) -> Chart:
    info = frontier_info(report, slo)
    drawable = any(v is not None for v in info.sweep.baseline.interactivity)
    return Chart(
        "frontier",
        "Throughput and interactivity",
        "Each point is a concurrency, written beside it. Up and to the right is better; the star is what we recommend.",
        frontier_figure(info) if drawable else None,
        ("side", "concurrency", "interactivity (tok/s/user)", "output (tok/s)"),
        tuple(
            (name, conc, _r(x), _r(y))
            for side, name, *_ in SIDES
            for conc, x, y in zip(
                *(getattr(getattr(info.sweep, side), k) for k in ("conc", "interactivity", "output_tput")), strict=True
            )
        ),
        empty="Interactivity by concurrency was not measured for this run.",
    )


class Ecdf(NamedTuple):
    """Sorted values in seconds of each side."""

    baseline: list[float]
    winner: list[float]


LATENCIES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "e2el_s": "End-to-end latency"}


def ecdf_info(report: Report, key: str) -> Ecdf:
    samples = report.get("samples") or {}
    return Ecdf(
        *(sorted(float(s[key]) for s in samples.get(side) or [] if s.get(key) is not None) for side, *_ in SIDES)
    )


def ecdf_figure(info: Ecdf, title: str) -> Figure:
    data = []
    for (_, name, tone, dash), values in zip(SIDES, info, strict=True):
        share = [(i + 1) / len(values) for i in range(len(values))]
        data.append(
            fig.line(
                name,
                [v * 1e3 for v in values],
                share,
                tone,
                dash=dash,
                shape="hv",
                hovertemplate="%{y:.0%} of requests within %{x:.1f} ms<extra>" + name + "</extra>",
            )
        )
    shapes = [fig.level(p, label) for p, label in ((0.5, "p50"), (0.95, "p95"))]
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis(f"{title} (ms)", rangemode="tozero"),
            fig.axis("share of requests", tickformat=".0%", range=[0, 1.03]),
            shapes=[s for s, _ in shapes],
            annotations=[a for _, a in shapes],
        ),
    }


def ecdf_chart(report: Report, key: str) -> Chart:
    info, title = ecdf_info(report, key), LATENCIES[key]
    return Chart(
        f"ecdf-{key.removesuffix('_s')}",
        title,
        "Share of held-out requests answered within a time; further left is faster.",
        ecdf_figure(info, title) if info.baseline and info.winner else None,
        ("side", "request, sorted", f"{title.lower()} (s)"),
        tuple(
            (name, i, _r(v, 6))
            for (_, name, *_), values in zip(SIDES, info, strict=True)
            for i, v in enumerate(values, 1)
        ),
        empty="Latency samples were not kept for this run.",
    )


class Operators(NamedTuple):
    """(name, baseline seconds, winner seconds or None where the winner has no such operator), largest first."""

    rows: list[tuple[str, float, float | None]]


def operators_info(report: Report) -> Operators:
    rows = [(str(r["name"]), float(r["baseline_s"]), r.get("winner_s")) for r in report.get("operators") or []]
    return Operators(sorted(rows, key=lambda r: -r[1]))


def operators_figure(info: Operators) -> Figure:
    names = [r[0] for r in reversed(info.rows)]
    data = []
    for i, (_, name, tone, _dash) in enumerate(SIDES, 1):
        values = [row[i] for row in reversed(info.rows)]
        if any(v is not None for v in values):
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "y": names,
                    "x": [None if v is None else v * 1e3 for v in values],
                    "marker": {"color": tone, "pattern": {"shape": "/" if i == 1 else "", "size": 5, "solidity": 0.25}},
                    "hovertemplate": "%{x:.3f} ms<extra>" + name + "</extra>",
                }
            )
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis("time per step (ms)", rangemode="tozero"),
            fig.axis(""),
            barmode="group",
            bargap=0.3,
            bargroupgap=0.08,
        ),
    }


def operators(report: Report) -> Chart:
    info = operators_info(report)
    fused = any(r[2] is None for r in info.rows)
    note = (
        " The optimised version runs some operators as one fused kernel, so they have no time of their own."
        if fused
        else ""
    )
    return Chart(
        "operators",
        "Time by operator",
        f"Share of one step on this endpoint's traffic.{note}",
        operators_figure(info) if info.rows else None,
        ("operator", "baseline (s)", "optimised (s)"),
        tuple((n, _r(b, 7), _r(w, 7)) for n, b, w in info.rows),
        empty="Operator times were not profiled for this run.",
    )


class Pairs(NamedTuple):
    ratios: list[float]
    ratio: float
    low: float
    high: float


def pairs_info(report: Report) -> Pairs | None:
    speed = report.get("speedup") or {}
    ratios = [float(r) for r in (report.get("samples") or {}).get("pair_ratios") or [] if r is not None]
    if not ratios or speed.get("ratio") is None:
        return None
    return Pairs(ratios, float(speed["ratio"]), float(speed["ci_low"]), float(speed["ci_high"]))


def pairs_figure(info: Pairs) -> Figure:
    shape, label = fig.level(1.0, "baseline")
    interval = {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": info.low,
        "y1": info.high,
        "layer": "below",
        "fillcolor": f"{WINNER}/0.14",
        "line": {"width": 0},
    }
    mean = fig.line("paired ratio", [0.5, len(info.ratios) + 0.5], [info.ratio] * 2, WINNER, hoverinfo="skip")
    each = fig.points(
        "one pair",
        list(range(1, len(info.ratios) + 1)),
        info.ratios,
        WINNER,
        size=9,
        hovertemplate="pair %{x}: %{y:.3f}×<extra></extra>",
    )
    return {
        "data": [mean, each],
        "layout": fig.layout(
            fig.axis("interleaved pair", tickformat="d", dtick=max(1, len(info.ratios) // 8)),
            fig.axis("ratio (×)"),
            shapes=[interval, shape],
            annotations=[label],
        ),
    }


def pairs(report: Report) -> Chart:
    info = pairs_info(report)
    return Chart(
        "pairs",
        "Every pair",
        "Optimised over baseline, interleaved over HTTP on held-out requests; the band is the 95% interval.",
        pairs_figure(info) if info else None,
        ("pair", "ratio (×)"),
        tuple((i, _r(r)) for i, r in enumerate(info.ratios, 1)) if info else (),
        empty="No end-to-end pair was measured for this run.",
    )


class Beside(NamedTuple):
    """Our two curves and others' points by what they were measured on. Never one frontier: the hardware differs."""

    sweep: Sweep
    others: dict[str, list[tuple[float, float, int, str]]]  # label -> (interactivity, tok/s, concurrency, of what)


MOST_OTHERS = 8  # labels that are drawn; the table has all
MARKS = ("diamond", "square", "triangle-up", "cross", "x", "star", "hexagon", "triangle-down")


def beside_info(report: Report, published: Sequence[Mapping[str, Any]]) -> Beside:
    others: dict[str, list[tuple[float, float, int, str]]] = {}
    for p in sorted(published, key=lambda p: (p["label"], p["conc"])):
        of = "a device" if p["per_device"] else "all devices"
        others.setdefault(p["label"], []).append((p["interactivity"], p["output_tput"], p["conc"], of))
    return Beside(sweep_info(report), others)


def beside_figure(info: Beside) -> Figure:
    data = []
    for side, name, tone, dash in SIDES:
        c: Curve = getattr(info.sweep, side)
        mark = {"size": 8, "symbol": _symbol(side)}
        data.append(
            fig.line(
                f"{name}, this machine",
                c.interactivity,
                c.output_tput,
                tone,
                dash=dash,
                mode="lines+markers",
                marker=mark,
            )
        )
    for mark, (label, points) in zip(MARKS, info.others.items(), strict=False):
        x, y, conc, of = zip(*points, strict=True)
        text = [f"{label} at concurrency {c}, {o}" for c, o in zip(conc, of, strict=True)]
        hover = "%{y:.1f} tok/s · %{x:.1f} tok/s/user<br>%{text}<extra>other hardware</extra>"
        data.append(
            fig.points(f"{label} (other hardware)", x, y, fig.MUTED, f"{mark}-open", text=text, hovertemplate=hover)
        )
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis("interactivity, 1/TPOT (tok/s/user)", type="log"),
            fig.axis("output throughput (tok/s)", type="log"),
        ),
    }


def beside(report: Report, published: Sequence[Mapping[str, Any]]) -> Chart:
    info = beside_info(report, published)
    left_out = len(info.others) - MOST_OTHERS
    more = f" {left_out} more groups are in the table." if left_out > 0 else ""
    ours = (
        (f"{name}, this machine", _r(x), _r(y), conc, "this machine")
        for side, name, *_ in SIDES
        for conc, x, y in zip(
            *(getattr(getattr(info.sweep, side), k) for k in ("conc", "interactivity", "output_tput")), strict=True
        )
    )
    others = (
        (f"{label} (other hardware)", _r(x), _r(y), c, of)
        for label, points in info.others.items()
        for x, y, c, of in points
    )
    return Chart(
        "published",
        "Beside published results",
        f"Others' results were measured on other hardware and other models: a place on the map, not a comparison.{more}",
        beside_figure(info) if info.others else None,
        ("series", "interactivity (tok/s/user)", "output (tok/s)", "concurrency", "tokens/s of"),
        tuple([*ours, *others]) if info.others else (),
        empty="No published results were added.",
        size="tall",
    )


def report_charts(
    report: Report, slo: Mapping[str, Any], published: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Chart]:
    """All of the page's charts by their place. `published`: `optimizer.published.Published` as JSON."""
    return {
        "throughput": by_concurrency(report),
        "frontier": frontier(report, slo),
        "ttft": ecdf_chart(report, "ttft_s"),
        "tpot": ecdf_chart(report, "tpot_s"),
        "e2el": ecdf_chart(report, "e2el_s"),
        "operators": operators(report),
        "pairs": pairs(report),
        "published": beside(report, published),
    }


def _symbol(side: str) -> str:
    return "circle-open" if side == "baseline" else "circle"


def _r(value: Any, digits: int = 4) -> Any:
    return round(value, digits) if isinstance(value, float) else value
