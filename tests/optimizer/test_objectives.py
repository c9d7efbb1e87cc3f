"""An objective judges windows the right way round, bends the traffic it needs, and recommends a point within the SLO."""

from __future__ import annotations

import math

import pytest

from optimizer.config import ConfigError, RunConfig
from optimizer.measure.samples import LoadResult, RequestSample, Slo
from optimizer.objectives import OBJECTIVES, frontier, recommended, usd_per_million
from tests.optimizer.scripted import SMALL


def window(ttft: float, tpot: float, requests: int = 4, osl: int = 11) -> LoadResult:
    """`requests` one after the other, each answered at that pace."""
    e2el = ttft + (osl - 1) * tpot
    samples = tuple(RequestSample(i, 0.0, 0.0, ttft, (), e2el, 8, osl, 200) for i in range(requests))
    return LoadResult(samples, requests * e2el, 1)


SLOW, FAST = window(0.4, 0.02), window(0.1, 0.02)
SLO = Slo(ttft_s=0.2)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_faster_is_above_one_for_every_objective(name: str) -> None:
    goal = OBJECTIVES[name]
    assert goal.ratio(FAST, SLOW, SLO) > 1 > goal.ratio(SLOW, FAST, SLO)
    assert goal.ratio(FAST, FAST, SLO) == pytest.approx(1.0)


def test_ratios_are_of_what_the_objective_is_about() -> None:
    assert OBJECTIVES["ttft"].ratio(FAST, SLOW, Slo()) == pytest.approx(4.0)
    assert OBJECTIVES["first_tokens"].ratio(FAST, SLOW, Slo()) == pytest.approx(0.6 / 0.3)
    assert OBJECTIVES["output_throughput"].ratio(FAST, SLOW, Slo()) == pytest.approx(0.6 / 0.3)
    assert OBJECTIVES["goodput"].ratio(FAST, SLOW, SLO) == pytest.approx((4.5 / 1.2) / (0.5 / 2.4))


def test_a_baseline_that_meets_no_limit_still_gives_a_finite_ratio() -> None:
    assert math.isfinite(OBJECTIVES["goodput"].ratio(FAST, SLOW, SLO))


@pytest.mark.parametrize(
    ("name", "users", "longest", "searched"),
    [("output_throughput", 2, 12, 12), ("single_user", 1, 12, 12), ("ttft", 2, 12, 1), ("first_tokens", 2, 6, 6)],
)
def test_the_traffic_is_bent_only_where_the_objective_needs_it(
    name: str, users: int, longest: int, searched: int
) -> None:
    goal = OBJECTIVES[name]
    bent, seen = goal.traffic(SMALL, 6), goal.searched(SMALL, 6)
    assert (bent.concurrency, bent.osl[-1], seen.osl[-1]) == (users, longest, searched)
    assert bent.isl == SMALL.isl
    assert max(s.osl for s in seen.sample(64, 1)) <= searched
    assert bool(seen.notes) == (searched != 12), "what is cut is said"


def row(conc: int, baseline: tuple[float, float, float], winner: tuple[float, float, float]) -> dict:
    names = ("output_tput", "interactivity", "p95_ttft")
    sides = {"baseline": baseline, "winner": winner}
    return {"conc": conc} | {
        side: dict(zip(names, values, strict=True)) | {"median_ttft": values[2]} for side, values in sides.items()
    }


SWEEP = [
    row(1, (20, 20, 0.3), (60, 60, 0.1)),
    row(4, (50, 12, 0.9), (150, 40, 0.4)),
    row(8, (70, 8, 2.0), (200, 25, 1.1)),
    row(16, (71, 4, 4.0), (190, 12, 2.5)),  # more users, and less of everything
]


def test_the_frontier_has_what_nothing_beats_in_both_ways() -> None:
    points = frontier(SWEEP, Slo(), 1.0)
    best = {(p["side"], p["conc"]) for p in points if p["on_frontier"]}
    assert best == {("winner", 1), ("winner", 4), ("winner", 8)}
    assert points[1]["usd_per_m"] == pytest.approx(1 / 3600 / 60 * 1e6)


@pytest.mark.parametrize(("name", "conc"), [("output_throughput", 8), ("cost", 8), ("single_user", 1), ("ttft", 1)])
def test_the_point_advised_is_the_objectives_best(name: str, conc: int) -> None:
    found = recommended(frontier(SWEEP, Slo(), 0.0), OBJECTIVES[name])
    assert found and (found["side"], found["conc"]) == ("winner", conc)


def test_the_point_advised_meets_the_slo() -> None:
    found = recommended(frontier(SWEEP, Slo(ttft_s=0.5, tpot_s=1 / 30), 0.0), OBJECTIVES["output_throughput"])
    assert found and found["conc"] == 4 and found["meets_slo"] and "2 of 4" in found["why"]


def test_where_nothing_meets_the_slo_the_nearest_says_so() -> None:
    found = recommended(frontier(SWEEP, Slo(ttft_s=0.01), 0.0), OBJECTIVES["output_throughput"])
    assert found and found["conc"] == 1 and not found["meets_slo"] and "No concurrency measured meets" in found["why"]


def test_without_a_measured_winner_nothing_is_advised() -> None:
    assert recommended([], OBJECTIVES["cost"]) is None


def test_cost_needs_a_price() -> None:
    assert usd_per_million(0.0, 50.0) is None and usd_per_million(3.6, 1000.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"objective": "fame"}, "unknown"),
        ({"objective": "goodput"}, "give limits for ttft_s or tpot_s"),
        ({"objective": "cost"}, "needs price_per_hour"),
        ({"objective": "first_tokens", "first_tokens": 0}, "first_tokens is 0"),
        ({"max_memory_bytes": -1}, "max_memory_bytes"),
    ],
)
def test_an_objective_that_cannot_be_is_refused_with_the_mend(given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig("demo", SMALL.to_json(), "data", **given)
