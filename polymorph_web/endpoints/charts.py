"""An endpoint's charts: the shape of its traffic, and the sparkline of the fleet page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        "type": "bar", "x": info.edges[:-1], "y": info.shares, "width": widths, "offset": 0,
        "marker": {"color": f"{tone}/0.75", "line": {"width": 0}}, "name": title,
        "hovertemplate": "from %{x:.0f} tokens: %{y:.1%}<extra></extra>",
    }
    marks, notes = [], []
    for value, label, height in ((info.median, "p50", 1.0), (info.p95, "p95", 1.0)):
        marks.append({
            "type": "line", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 0.94,
            "line": {"color": "var(--text-2)", "width": 1, "dash": "dot"},
        })
        notes.append({
            "xref": "x", "x": math.log10(max(value, 1)), "yref": "paper", "y": height, "yanchor": "top", "showarrow": False,
            "text": f"{label} {value:.0f}", "font": {"size": 11, "color": "var(--text-2)"},
        })
    low, high = math.log10(info.edges[0]), math.log10(info.edges[-1])
    pad = max(0.04, 0.05 * (high - low))
    return {"data": [bars], "layout": fig.layout(
        fig.axis(f"{title} (tokens)", type="log", dtick="D2" if high - low < 1.2 else 1, range=[low - pad, high + pad]),
        fig.axis("", tickformat=".0%", nticks=4), legend=False, shapes=marks, annotations=notes, bargap=0)}


def histogram_chart(chart_id: str, title: str, lengths: Sequence[int]) -> Chart:
    """`chart_id` is `isl` or `osl`: it names the element and picks the colour."""
    info = histogram_info(lengths)
    tone = "var(--c-cache)" if chart_id == "isl" else WINNER
    return Chart(
        chart_id, title, f"Median {info.median:.0f} tokens, p95 {info.p95:.0f}.",
        histogram_figure(info, title, tone) if info.shares else None,
        ("from (tokens)", "to (tokens)", "share"),
        tuple((round(a, 1), round(b, 1), round(s, 4)) for a, b, s in zip(info.edges, info.edges[1:], info.shares, strict=False)),
        empty="Fill in the traffic to see its shape.", size="short",
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


def traffic_charts(sample: Sequence[Mapping[str, Any]] | Sequence[Any]) -> tuple[Chart, Chart]:
    """ISL and OSL histograms of sampled request shapes (anything with `isl` and `osl`)."""

    def lengths(key: str) -> list[int]:
        return [int(s[key] if isinstance(s, Mapping) else getattr(s, key)) for s in sample]

    return histogram_chart("isl", "Input length", lengths("isl")), histogram_chart("osl", "Output length", lengths("osl"))
