"""A canary against an equal-sized sample of the stable version, from the gateway's records. Pure: rows in, verdict out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SLOWER = 1.10  # a median this many times the stable's is a breach, once enough requests were seen
MUCH_SLOWER = 2.0  # and this is one after few
FEW = 6
ERROR_MARGIN = 0.05  # the canary may fail this much more often than stable


class Shape(NamedTuple):
    """What counts of one answered request. Times in seconds."""

    role: str
    osl: int
    ttft_s: float
    e2el_s: float
    status: int

    @property
    def tpot_s(self) -> float:
        return (self.e2el_s - self.ttft_s) / max(1, self.osl - 1)


class Comparison(NamedTuple):
    """`breach` and `hold` are sentences, empty where there is none. `rows` is the table that people see."""

    rows: list[dict[str, Any]]
    canary_n: int
    stable_n: int
    breach: str
    hold: str


METRICS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("End-to-end latency", "e2el_s"))


def compare(shapes: Sequence[Shape], soak: int, slo: Mapping[str, float]) -> Comparison:
    """Judges the newest equal-sized samples of both roles. No data is a hold, never a pass."""
    newest = {role: [s for s in shapes if s.role == role] for role in ("canary", "stable")}
    size = min(len(newest["canary"]), len(newest["stable"]))
    sample = {role: rows[-size:] if size else [] for role, rows in newest.items()}
    good = {role: [s for s in rows if s.status < 400] for role, rows in sample.items()}
    rows = [_row(title, name, good) for title, name in METRICS]
    errors = {role: _error_share(newest[role]) for role in newest}
    rows.append(_error_row(errors, {r: len(v) for r, v in newest.items()}))
    breach = _breach(newest, good, errors, soak, slo)
    missing = soak - size
    hold = "" if missing <= 0 else f"{size} of {soak} requests were answered by each side; waiting for more."
    return Comparison(rows, len(newest["canary"]), len(newest["stable"]), breach, hold)


def _breach(
    newest: Mapping[str, Sequence[Shape]],
    good: Mapping[str, Sequence[Shape]],
    errors: Mapping[str, float],
    soak: int,
    slo: Mapping[str, float],
) -> str:
    failed = sum(s.status >= 400 for s in newest["canary"])
    if failed >= 2 and errors["canary"] > errors["stable"] + ERROR_MARGIN:
        return f"The canary failed {failed} of {len(newest['canary'])} requests; the stable version failed {errors['stable']:.0%}."
    enough, n = min(soak, 20), min(len(good["canary"]), len(good["stable"]))
    if n < min(FEW, enough):
        return ""
    limit = SLOWER if n >= enough else MUCH_SLOWER
    for title, name in METRICS[1:]:
        canary, stable = (statistics.median(getattr(s, name) for s in good[r]) for r in ("canary", "stable"))
        if stable > 0 and canary > limit * stable:
            return f"{title} of the canary is {canary / stable:.2f} times the stable version's (median of {n}); {limit:g} is the limit."
    for title, name in METRICS[:2]:
        goal = slo.get(name)
        if goal and n >= enough and _p95(good["canary"], name) > goal >= _p95(good["stable"], name):
            return f"p95 {title} of the canary is over the SLO of {1e3 * goal:.0f} ms, and the stable version's is not."
    return ""


def _row(title: str, name: str, good: Mapping[str, Sequence[Shape]]) -> dict[str, Any]:
    values = {r: [getattr(s, name) for s in rows] for r, rows in good.items()}
    median = {r: statistics.median(v) if v else None for r, v in values.items()}
    both = median["canary"] is not None and median["stable"]
    ratio = median["canary"] / median["stable"] if both else None
    return {
        "metric": f"{title}, median",
        "unit": "s",
        "stable": median["stable"],
        "stable_n": len(values["stable"]),
        "canary": median["canary"],
        "canary_n": len(values["canary"]),
        "ratio": ratio,
        "verdict": "inconclusive" if ratio is None else "fail" if ratio > SLOWER else "pass",
    }


def _error_row(errors: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, Any]:
    worse = errors["canary"] > errors["stable"] + ERROR_MARGIN
    return {
        "metric": "Failed requests",
        "unit": "share",
        "stable": errors["stable"] if counts["stable"] else None,
        "stable_n": counts["stable"],
        "canary": errors["canary"] if counts["canary"] else None,
        "canary_n": counts["canary"],
        "ratio": None,
        "verdict": "inconclusive" if not counts["canary"] else "fail" if worse else "pass",
    }


def _error_share(rows: Sequence[Shape]) -> float:
    return sum(s.status >= 400 for s in rows) / len(rows) if rows else 0.0


def _p95(rows: Sequence[Shape], name: str) -> float:
    ordered = sorted(getattr(s, name) for s in rows)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
