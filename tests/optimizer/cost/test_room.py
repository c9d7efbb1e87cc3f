"""What a focus is worth at most, against figures worked out by hand for the tiny model (see test_roofline)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.models.config import ModelConfig
from optimizer.cost.roofline import Ceilings, Workload, floors
from optimizer.cost.room import Roof

STARVED = Ceilings(read=1e9, copy=5e9, gemm=1e15, measured=True)  # bytes decide
BUSY = Ceilings(read=1e15, copy=1e15, gemm=1e9, measured=True)  # operations decide
PROFILE = {"projections": 6e-3, "head": 1e-3, "attention": 2e-3, "cache": 1e-3, "pointwise": 0.0}
# a request is one prefill step and four of decode; 10 ms each
WORK = Workload(2, 20, 8, 20, {"prefill": 0.01, "decode": 0.01}, {"prefill": PROFILE, "decode": PROFILE})


def roof(config: ModelConfig, ceilings: Ceilings = STARVED) -> Roof:
    return Roof(config, "float32", ceilings, WORK)


def test_of_the_baseline_it_is_the_profiles_share_above_the_floor(tiny_config: ModelConfig) -> None:
    least = floors(tiny_config, "float32", STARVED, WORK)
    above = sum(
        steps * (PROFILE[op] - least[phase][op])
        for phase, steps in {"prefill": 1, "decode": 4}.items()
        for op in ("projections", "head", "pointwise")
    )
    worth = roof(tiny_config).worth(1.0, {})
    assert worth["projections"] == pytest.approx(0.05 / (0.05 - above) - 1, rel=0.02)
    assert worth["projections"] > worth["attention"] > 0 and worth["attention"] == worth["cache"], "they reach the same"


def test_what_an_incumbent_gained_is_gone_from_its_focus(tiny_config: ModelConfig) -> None:
    here = roof(tiny_config)
    before, after = here.worth(1.0, {}), here.worth(2.0, {"projections": 8.0, "head": 8.0})
    assert after["projections"] < before["projections"] and after["attention"] > before["attention"]
    unknown = here.worth(2.0, {})
    assert after["projections"] < unknown["projections"], "of another hand's program all operators shrank alike"


def test_at_the_machines_bound_no_operator_has_room(tiny_config: ModelConfig) -> None:
    here = roof(tiny_config)
    fastest = WORK.request_s(WORK.step_s) / sum(
        WORK.weights()[phase] * sum(found.values())
        for phase, found in floors(tiny_config, "float32", STARVED, WORK).items()
    )
    for ratio in (fastest, 2 * fastest):
        worth = here.worth(ratio, {})
        assert [worth[f] for f in ("projections", "attention", "cache")] == pytest.approx([0, 0, 0], abs=1e-6)
    assert here.worth(0.5 * fastest, {})["projections"] > 0.3
    assert here.worth(fastest, {})["scheduling"] > 1, "fewer steps read the weights less often"


def test_scheduling_saves_no_arithmetic_and_no_more_than_drafts_hold(tiny_config: ModelConfig) -> None:
    here = roof(tiny_config)
    most, half, none = (here.worth(1.0, {}, held)["scheduling"] for held in (1.0, 0.5, 0.0))
    assert most > half > none == 0
    assert most == pytest.approx(0.05 / (0.05 - 0.04 * 8 / 9) - 1, rel=0.01)
    busy = Roof(tiny_config, "float32", BUSY, replace(WORK, step_s={"prefill": 4e-3, "decode": 5e-4}, operators={}))
    assert busy.worth(1.0, {})["scheduling"] < 0.1, "decode is at its arithmetic"


def test_without_a_profile_all_operators_are_alike(tiny_config: ModelConfig) -> None:
    worth = replace(roof(tiny_config), work=replace(WORK, operators={})).worth(1.0, {})
    assert worth["projections"] > worth["attention"] > 0


def test_a_programs_time_goes_to_waiting_to_bytes_or_to_arithmetic(tiny_config: ModelConfig) -> None:
    slow = roof(tiny_config)
    assert slow.bottleneck("same", 1.0) == "barrier"
    assert slow.bottleneck("same", 20.0) == "bytes"
    assert roof(tiny_config, BUSY).bottleneck("same", 10.0) == "arithmetic"
