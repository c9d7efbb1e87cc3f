"""An endpoint's charts: the shape of its traffic, and the sparkline of the fleet page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from polymorph_web.ui import figures as fig
from polymorph_web.ui.figures import WINNER, Chart, Figure


class Histogram(NamedTuple):
    """Logarithmic bins: `edges` has one more entry than `shares`; shares sum to 1 (or are empty)."""

    edges: list[float]
    shares: list[float]
    median: float
    p95: float


def histogram_info(lengths: Sequence[int], bins: int = 24) -> Histogram:
    """A histogram of token counts, in bins of equal width on a logarithmic axis. Lengths below 1 count as 1."""
    values = sorted(max(1, int(v)) for v in lengths)
    if not values:
        return Histogram([], [], 0.0, 0.0)
    low, high = math.log(values[0]), math.log(values[-1] + 1)
    width = max((high - low) / bins, 1e-9)
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((math.log(value) - low) / width))] += 1
    edges = [math.exp(low + i * width) for i in range(bins + 1)]
    return Histogram(edges, [c / len(values) for c in counts], _quantile(values, 0.5), _quantile(values, 0.95))


def _quantile(ordered: Sequence[int], q: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def histogram_figure(info: Histogram, title: str, tone: str) -> Figure:
    widths = [b - a for a, b in zip(info.edges, info.edges[1:], strict=False)]
    bars = {
        "type": "bar",
        "x": info.edges[:-1],
        "y": info.shares,
        "width": widths,
        "offset": 0,
        "marker": {"color": f"{tone}/0.75", "line": {"width": 0}},
        "name": title,
        "hovertemplate": "from %{x:.0f} tokens: %{y:.1%}<extra></extra>",
    }
    marks, notes = [], []
    for value, label, height in ((info.median, "p50", 1.0), (info.p95, "p95", 1.0)):
        marks.append(
            {
                "type": "line",
                "yref": "paper",
                "x0": value,
                "x1": value,
                "y0": 0,
                "y1": 0.94,
                "line": {"color": "var(--text-2)", "width": 1, "dash": "dot"},
            }
        )
        notes.append(
            {
                "xref": "x",
                "x": math.log10(max(value, 1)),
                "yref": "paper",
                "y": height,
                "yanchor": "top",
                "showarrow": False,
                "text": f"{label} {value:.0f}",
                "font": {"size": 11, "color": "var(--text-2)"},
            }
        )
    low, high = math.log10(info.edges[0]), math.log10(info.edges[-1])
    pad = max(0.04, 0.05 * (high - low))
    return {
        "data": [bars],
        "layout": fig.layout(
            fig.axis(f"{title} (tokens)", type="log", tickvals=_doublings(low, high), range=[low - pad, high + pad]),
            fig.axis("", tickformat=".0%", nticks=4),
            legend=False,
            shapes=marks,
            annotations=notes,
            bargap=0,
        ),
    }


def _doublings(low: float, high: float) -> list[int]:
    """Powers of two between two common logarithms, few enough to be read beside each other."""
    first, last = math.ceil(low * math.log2(10)), math.floor(high * math.log2(10))
    return [2**n for n in range(first, last + 1, 1 + (last - first) // 6)]


def histogram_chart(chart_id: str, title: str, lengths: Sequence[int]) -> Chart:
    """`chart_id` is `isl` or `osl`: it names the element and picks the colour."""
    info = histogram_info(lengths)
    tone = "var(--c-cache)" if chart_id == "isl" else WINNER
    return Chart(
        chart_id,
        title,
        f"Median {info.median:.0f} tokens, p95 {info.p95:.0f}.",
        histogram_figure(info, title, tone) if info.shares else None,
        ("from (tokens)", "to (tokens)", "share"),
        tuple(
            (round(a, 1), round(b, 1), round(s, 4))
            for a, b, s in zip(info.edges, info.edges[1:], info.shares, strict=False)
        ),
        empty="Fill in the traffic to see its shape.",
        size="short",
    )


class Spark(NamedTuple):
    """A polyline in a 120 x 28 box. `marks`: where a version changed. Empty `points`: fewer than two values."""

    points: str
    area: str
    marks: list[float]
    last: tuple[float, float] | None
    label: str


def sparkline(values: Sequence[float | None], marks: Sequence[int] = (), unit: str = "tok/s") -> Spark:
    """`marks` are indices into `values`. None is a gap that the line bridges."""
    known = [(i, float(v)) for i, v in enumerate(values) if v is not None]
    if len(known) < 2:
        return Spark("", "", [], None, "not enough data for a trend")
    low, high = min(v for _, v in known), max(v for _, v in known)
    span, right = (high - low) or 1.0, len(values) - 1

    def place(i: int, v: float) -> tuple[float, float]:
        return round(2 + 116 * i / right, 1), round(25 - 22 * (v - low) / span, 1)

    spots = [place(i, v) for i, v in known]
    line = " ".join(f"{x},{y}" for x, y in spots)
    area = f"{spots[0][0]},28 {line} {spots[-1][0]},28"
    label = f"from {known[0][1]:.0f} to {known[-1][1]:.0f} {unit}, lowest {low:.0f}, highest {high:.0f}"
    return Spark(line, area, [place(i, 0)[0] for i in marks if 0 <= i <= right], spots[-1], label)


def traffic_charts(sample: Sequence[Any]) -> tuple[Chart, Chart]:
    """ISL and OSL histograms of sampled request shapes (anything with `isl` and `osl`)."""
    return (
        histogram_chart("isl", "Input length (ISL)", [s.isl for s in sample]),
        histogram_chart("osl", "Output length (OSL)", [s.osl for s in sample]),
    )


class Series(NamedTuple):
    """Equal slices of time: middle (unix seconds), output tok/s, p50 and p95 TTFT in seconds (None in an empty slice)."""

    at: list[float]
    output_tput: list[float]
    p50_ttft: list[float | None]
    p95_ttft: list[float | None]
    changes: list[tuple[float, str]]  # when another version first answered


def series_info(requests: Sequence[Any], slices: int = 60) -> Series:
    """`requests` have `ts`, `osl`, `ttft_s`, `version_id`, as rows or dicts; failed ones (status 400 and up) are left out."""
    rows = sorted((r for r in map(_as_dict, requests) if int(r.get("status") or 200) < 400), key=lambda r: r["ts"])
    if not rows:
        return Series([], [], [], [], [])
    start, end = float(rows[0]["ts"]), float(rows[-1]["ts"])
    width = max((end - start) / slices, 1.0)
    count = int((end - start) / width) + 1
    groups: list[list[Mapping[str, Any]]] = [[] for _ in range(count)]
    for row in rows:
        groups[int((float(row["ts"]) - start) / width)].append(row)
    changes = [
        (float(b["ts"]), str(b["version_id"]))
        for a, b in itertools.pairwise(rows)
        if a["version_id"] != b["version_id"]
    ]
    seen: dict[str, float] = {}
    for at, version in changes:
        seen.setdefault(version, at)
    waits = [sorted(float(r["ttft_s"]) for r in group) for group in groups]
    return Series(
        [start + (i + 0.5) * width for i in range(count)],
        [sum(int(r["osl"]) for r in group) / width for group in groups],
        [_quantile(w, 0.5) if w else None for w in waits],
        [_quantile(w, 0.95) if w else None for w in waits],
        [(at, version) for version, at in seen.items()],
    )


def _as_dict(row: Any) -> Mapping[str, Any]:
    keys = ("ts", "osl", "ttft_s", "version_id", "status")
    return row if isinstance(row, Mapping) else {k: getattr(row, k) for k in keys}


def endpoint_series(requests: Sequence[Any], versions: Sequence[Any] = ()) -> list[Chart]:
    """Throughput and time to first token over time; `versions` (rows or ids) limits the marks to known ones."""
    info = series_info(requests)
    known = {getattr(v, "version_id", v) for v in versions}
    marks = [(at, version) for at, version in info.changes if not known or version in known]
    stamps = [_iso(at) for at in info.at]
    rows = tuple(
        (t, round(tput, 2), *(None if v is None else round(v, 5) for v in (p50, p95)))
        for t, tput, p50, p95 in zip(stamps, info.output_tput, info.p50_ttft, info.p95_ttft, strict=True)
    )
    columns = ("time", "output (tok/s)", "p50 TTFT (s)", "p95 TTFT (s)")
    empty = "No request has been answered yet. Send one from the try-it box."
    tput = [
        fig.line(
            "output",
            stamps,
            [round(v, 2) for v in info.output_tput],
            WINNER,
            hovertemplate="%{y:.1f} tok/s<extra></extra>",
        )
    ]
    wait = [
        fig.line(
            name,
            stamps,
            [None if v is None else v * 1e3 for v in values],
            tone,
            dash=dash,
            connectgaps=True,
            hovertemplate="%{y:.1f} ms<extra>" + name + "</extra>",
        )
        for name, values, tone, dash in (
            ("p95", info.p95_ttft, WINNER, "solid"),
            ("p50", info.p50_ttft, fig.BASELINE, "dot"),
        )
    ]
    return [
        Chart(
            "output",
            "Output throughput",
            "Output tokens per second; a dotted mark is a change of version.",
            _series_figure(tput, marks, "output (tok/s)", legend=False) if rows else None,
            columns,
            rows,
            empty,
        ),
        Chart(
            "ttft",
            "Time to first token",
            "p50 and p95 of the requests in each slice of time.",
            _series_figure(wait, marks, "TTFT (ms)", legend=True) if rows else None,
            columns,
            rows,
            empty,
        ),
    ]


def _series_figure(data: list[dict[str, Any]], marks: list[tuple[float, str]], title: str, legend: bool) -> Figure:
    shapes = [
        {
            "type": "line",
            "yref": "paper",
            "x0": _iso(at),
            "x1": _iso(at),
            "y0": 0,
            "y1": 1,
            "line": {"color": "var(--text-2)", "width": 1, "dash": "dot"},
        }
        for at, _ in marks
    ]
    notes = [
        {
            "x": _iso(at),
            "yref": "paper",
            "y": 1,
            "yanchor": "top",
            "xanchor": "left",
            "text": f" {version}",
            "showarrow": False,
            "font": {"size": 11, "color": "var(--text-2)"},
        }
        for at, version in marks
    ]
    return {
        "data": data,
        "layout": fig.layout(
            fig.axis("", type="date"),
            fig.axis(title, rangemode="tozero"),
            legend=legend,
            shapes=shapes,
            annotations=notes,
        ),
    }


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
