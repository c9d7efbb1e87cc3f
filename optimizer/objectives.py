"""What a run is to make better: what is searched for, how a window of traffic is judged, which point is recommended.

An objective bends the traffic where it must: a single user is one user, and the time to the first N tokens is of
answers cut to N. Ratios are always "winner better than baseline by": above 1 is better, also where less is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimizer.measure.samples import LoadResult, Slo
from optimizer.traffic.profile import TrafficProfile

HALF = 0.5  # a request that meets the limits by half: keeps a ratio of two counts finite when one of them is 0


@dataclass(frozen=True, slots=True)
class Objective:
    """`value` judges one window; `key` is the field of a summary that shows the same figure."""

    name: str
    title: str  # as it stands in a sentence: "2.1 times the baseline's ..."
    unit: str
    key: str
    value: Callable[[LoadResult, Slo], float]
    more_is_better: bool = True
    users: int = 0  # 0: the traffic's own
    cuts: bool = False  # answers are cut to the run's `first_tokens`
    searches_first: bool = False  # a search looks at first tokens alone; the final figure is of whole answers

    def ratio(self, winner: LoadResult, baseline: LoadResult, slo: Slo) -> float:
        new, old = self.value(winner, slo), self.value(baseline, slo)
        return new / old if self.more_is_better else old / new

    def traffic(self, profile: TrafficProfile, first_tokens: int) -> TrafficProfile:
        """The traffic that this objective is measured on."""
        bent = replace(profile, concurrency=self.users, request_rate=0.0) if self.users else profile
        return bent.cut(first_tokens) if self.cuts else bent

    def searched(self, profile: TrafficProfile, first_tokens: int) -> TrafficProfile:
        """The traffic that candidates are compared on before the final measurement."""
        bent = self.traffic(profile, first_tokens)
        return bent.cut(1) if self.searches_first else bent


def _median(name: str) -> Callable[[LoadResult, Slo], float]:
    return lambda window, slo: float(window.percentiles(name)["median"] or float("nan"))


def _goodput(window: LoadResult, slo: Slo) -> float:
    return (sum(slo.met(r) for r in window.requests) + HALF) / window.duration_s


def _output(window: LoadResult, slo: Slo) -> float:
    return window.output_tput


OBJECTIVES: Mapping[str, Objective] = {
    o.name: o
    for o in (
        Objective("output_throughput", "output tokens/s", "tok/s", "output_tput", _output),
        Objective("goodput", "goodput (requests/s within the SLO)", "req/s", "goodput", _goodput),
        Objective("single_user", "output tokens/s of a single user", "tok/s", "output_tput", _output, users=1),
        Objective("ttft", "speed to the first token (median TTFT)", "s", "median_ttft", _median("ttft"), False, searches_first=True),
        Objective(
            "first_tokens", "speed to the first tokens (median time to N)", "s", "median_e2el", _median("e2el"), False, cuts=True
        ),
        Objective("cost", "output tokens per dollar", "tok/$", "output_tput", _output),
    )
}  # fmt: skip


def usd_per_million(price_per_hour: float, output_tput: float) -> float | None:
    """USD for a million output tokens at `output_tput` tokens a second; None without a price."""
    return price_per_hour / 3600 / output_tput * 1e6 if price_per_hour and output_tput else None


# the result: a frontier and one point of it


def frontier(by_concurrency: Iterable[Mapping[str, Any]], slo: Slo, price_per_hour: float) -> list[dict[str, Any]]:
    """Every measured (version, concurrency), with whether it meets the SLO and whether another is better in both ways.

    Better: more output tokens/s at no less interactivity (tokens/s/user), or the reverse.
    """
    points = [
        _point(row["conc"], side, row[side], slo, price_per_hour)
        for row in by_concurrency
        for side in ("baseline", "winner")
    ]
    return [p | {"on_frontier": not any(_dominates(q, p) for q in points)} for p in points]


def _point(conc: int, side: str, figures: Mapping[str, Any], slo: Slo, price: float) -> dict[str, Any]:
    speed, wait = figures.get("interactivity"), figures.get("p95_ttft")
    meets = bool(speed) and 1 / speed <= slo.tpot_s and wait is not None and wait <= slo.ttft_s
    kept = {k: figures.get(k) for k in ("output_tput", "interactivity", "median_ttft", "p95_ttft")}
    return {
        "side": side,
        "conc": conc,
        "meets_slo": meets,
        "usd_per_m": usd_per_million(price, figures["output_tput"]),
    } | kept


def _dominates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    ours, theirs = ((p["output_tput"] or 0.0, p["interactivity"] or 0.0) for p in (a, b))
    return ours != theirs and ours[0] >= theirs[0] and ours[1] >= theirs[1]


def recommended(points: Iterable[Mapping[str, Any]], objective: Objective) -> dict[str, Any] | None:
    """The winner's best point for the objective among those that meet the SLO; without one, the nearest, which says so."""
    own = [p for p in points if p["side"] == "winner"]
    if not own:
        return None
    fit = [p for p in own if p["meets_slo"]]
    if not fit:
        best = max(own, key=lambda p: p["interactivity"] or 0.0)
        return dict(best) | {"why": f"No concurrency measured meets the SLO; {best['conc']} at once comes nearest."}
    best = max(fit, key=lambda p: _worth(p, objective))
    many = "" if len(fit) == len(own) else f" among the {len(fit)} of {len(own)} that meet the SLO"
    return dict(best) | {"why": f"{best['conc']} requests at once: best {objective.title}{many}."}


def _worth(point: Mapping[str, Any], objective: Objective) -> float:
    """Latency objectives are best with few users, the others by tokens a second."""
    if not objective.more_is_better:
        return -(point["median_ttft"] or float("inf"))
    if objective.users == 1:
        return point["interactivity"] or 0.0
    return point["output_tput"] or 0.0
