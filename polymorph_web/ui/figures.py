"""What every chart shares: the `Chart` a template draws, and the parts of a Plotly figure.

A figure is a plain dict. Its colours are names of the style sheet's custom properties (`var(--c-winner)`), which the
browser resolves for the theme in use; an optional `/0.2` behind the name is an opacity. Nothing here reads a database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Figure = dict[str, Any]

BASELINE = "var(--c-baseline)"
WINNER = "var(--c-winner)"
MUTED = "var(--text-2)"
FOCI = ("attention", "projections", "cache", "scheduling", "fusion")
SYMBOLS = {
    "attention": "circle",
    "projections": "square",
    "cache": "diamond",
    "scheduling": "triangle-up",
    "fusion": "triangle-down",
}


class Chart(NamedTuple):
    """A titled figure with the same data as a table. `figure` None: there is nothing to draw, and `empty` says why."""

    id: str
    title: str
    summary: str  # one sentence that says what the picture shows, also its text alternative
    figure: Figure | None
    columns: tuple[str, ...] = ()  # with units
    rows: tuple[tuple[Any, ...], ...] = ()
    empty: str = "Nothing has been measured yet."
    size: str = ""  # "", "tall" or "short"

    @property
    def data_id(self) -> str:
        return f"data-{self.id}"

    @property
    def payload(self) -> dict[str, Any]:
        """What the browser gets: the figure and the table behind its CSV."""
        return {"figure": self.figure, "columns": list(self.columns), "rows": [list(row) for row in self.rows]}


def color(focus: str, alpha: float | None = None) -> str:
    """The colour of a focus, of `other` for one the palette does not know."""
    name = f"var(--c-{focus if focus in FOCI else 'other'})"
    return name if alpha is None else f"{name}/{alpha}"


def symbol(focus: str) -> str:
    return SYMBOLS.get(focus, "cross")


def axis(title: str, **extra: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": MUTED}},
        "gridcolor": "var(--c-grid)",
        "linecolor": "var(--c-axis)",
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "tickfont": {"size": 11, "color": MUTED},
        **extra,
    }


def layout(x: dict[str, Any], y: dict[str, Any], *, legend: bool = True, **extra: Any) -> dict[str, Any]:
    return {
        "xaxis": x,
        "yaxis": y,
        "showlegend": legend,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"size": 12, "color": MUTED},
            "bgcolor": "rgba(0,0,0,0)",
        },
        "margin": {"l": 52, "r": 16, "t": 28 if legend else 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "Inter Variable, Inter, system-ui, sans-serif", "size": 12, "color": "var(--text)"},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line-strong)",
            "align": "left",
            "font": {"size": 12, "color": "var(--text)"},
        },
        "hovermode": "closest",
        "dragmode": False,
        **extra,
    }


def line(name: str, x: Sequence[Any], y: Sequence[Any], tone: str, **extra: Any) -> dict[str, Any]:
    """A line; give `dash` so that two lines differ by more than their colour."""
    dash = extra.pop("dash", "solid")
    shape = extra.pop("shape", "linear")
    return {
        "type": "scatter",
        "mode": extra.pop("mode", "lines"),
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": tone, "width": 2, "dash": dash, "shape": shape},
        **extra,
    }


def points(
    name: str, x: Sequence[Any], y: Sequence[Any], tone: str, marker: str = "circle", **extra: Any
) -> dict[str, Any]:
    size = extra.pop("size", 8)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"color": tone, "size": size, "symbol": marker, "line": {"color": "var(--surface)", "width": 1}},
        **extra,
    }


def band(x: Sequence[Any], low: Sequence[Any], high: Sequence[Any], tone: str) -> dict[str, Any]:
    """The area between two curves, as one closed outline."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(list(x))],
        "y": [*high, *reversed(list(low))],
        "fill": "toself",
        "fillcolor": f"{tone}/0.16",
        "line": {"width": 0, "color": f"{tone}/0"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def level(y: float, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dashed horizontal line across the plot and its label: a shape and an annotation."""
    shape = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "layer": "below",
        "line": {"color": "var(--line-control)", "width": 1, "dash": "dash"},
    }
    label = {
        "xref": "paper",
        "x": 1,
        "y": y,
        "xanchor": "right",
        "yanchor": "bottom",
        "text": text,
        "showarrow": False,
        "font": {"size": 11, "color": MUTED},
    }
    return shape, label
