"""A run's configuration: valid or refused with a sentence that names the mend."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optimizer.config import Budget, ConfigError, RunConfig, parse_duration

GOOD: dict[str, Any] = {"model": "demo", "traffic": {"name": "demo"}, "data_dir": "data"}


def test_a_configuration_survives_json() -> None:
    config = RunConfig(**GOOD, foci=("attention",), slo={"ttft_s": 0.5}, budget_s=120)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": ""}, "needs a model"),
        ({"traffic": {}}, "needs a traffic profile"),
        ({"run_id": "../x"}, "Run id"),
        ({"dtype": "int3"}, "choose one of bfloat16"),
        ({"threads": -1}, "0 for all cores"),
        ({"objective": "beauty"}, "choose output_throughput"),
        ({"budget_s": 1}, "5m is a good start"),
        ({"budget_s": float("nan")}, "5m is a good start"),
        ({"foci": ("beauty",)}, "choose of attention"),
        ({"tolerance": "loose"}, "choose one of exact, near, quantised"),
        ({"price_per_hour": -1}, "cannot be negative"),
        ({"max_kv_bytes": 5}, "give 64 MB or more"),
        ({"slo": {"ttft": 1}}, "ttft_s and tpot_s"),
    ],
)
def test_a_bad_field_is_refused_with_its_mend(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig(**(GOOD | change))


def test_an_unknown_or_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="'bugdet_s'"):
        RunConfig.from_json(GOOD | {"bugdet_s": 1})
    with pytest.raises(ConfigError, match="lacks 'traffic'"):
        RunConfig.from_json({"model": "demo", "data_dir": "data"})


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), (" 2 m ", 120)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minutes", "-3m", "m"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="5m"):
        parse_duration(text)


@pytest.mark.parametrize("total", [10, 60, 300, 3600])
def test_every_budget_leaves_time_for_search_verification_and_measurement(total: float) -> None:
    budget = Budget(total)
    assert budget.search_end_s > 0.4 * total
    assert budget.search_end_s + budget.verify_s + budget.measure_s == pytest.approx(total)


@pytest.mark.parametrize("total", [60, 300])
def test_a_long_profile_leaves_the_search_its_quarter(total: float) -> None:
    assert Budget(total, search_began_s=total).search_end_s == pytest.approx(1.25 * total)
    assert Budget(total, search_began_s=1.0).search_end_s == Budget(total).search_end_s
