"""Traffic profiles: what a form, a preset and a trace turn into, and what sampling promises."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from optimizer.traffic.profile import SharedPrefix, TrafficError, TrafficProfile, clip
from optimizer.traffic.readers import parse_trace
from optimizer.traffic.sources import load_traffic, presets, profile_from_form, profile_from_trace

FORM = {"name": "chat", "isl_median": 128, "isl_p95": 256, "osl_median": 64, "concurrency": 4}


def a_trace(rows: int = 300) -> TrafficProfile:
    lines = [
        json.dumps({"timestamp": 500 * i, "input_length": 10 + i, "output_length": 1 + i, "hash_ids": [0, i + 1]})
        for i in range(rows)
    ]
    return profile_from_trace(parse_trace("\n".join(lines), "mine.jsonl"))


def test_a_form_gives_its_own_median_and_percentile_back() -> None:
    profile = profile_from_form(FORM)
    assert profile.quantile("isl", 0.5) == 128 and profile.quantile("isl", 0.95) == 256
    assert profile.quantile("osl", 0.5) == 64 and profile.quantile("osl", 0.95) == 128
    assert (profile.name, profile.source, profile.concurrency, profile.request_rate) == ("chat", "form", 4, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"isl_median": ""}, "isl_median is empty"),
        ({"isl_median": "long"}, "isl_median is 'long': give a number"),
        ({"isl_median": 0}, "isl_median is 0"),
        ({"isl_p95": 5}, "isl_p95 is 5, under the median"),
        ({"concurrency": -1}, "Concurrency is -1"),
        ({"request_rate": -2}, "Request_rate is -2"),
        ({"arrival_cv": 0}, "Arrival_cv is 0"),
        ({"shared_prefix_share": 2}, "Shared_prefix_share is 2"),
        ({"shared_prefix_tokens": -1}, "Shared_prefix_tokens cannot be negative"),
        ({"isl_median": float("inf")}, "isl_median"),
        ({"tokens": 5}, "no field 'tokens'"),
    ],
)
def test_a_form_value_that_cannot_be_is_named(change, says) -> None:
    with pytest.raises(TrafficError, match=says):
        profile_from_form(FORM | change)


def test_a_profile_survives_json_and_refuses_what_it_does_not_know() -> None:
    for profile in (profile_from_form(FORM), a_trace(), *presets().values()):
        assert TrafficProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    good = profile_from_form(FORM).to_json()
    for broken in (
        good | {"colour": 1},
        {"name": "x"},
        good | {"isl": [3, 2]},
        good | {"isl": "x"},
        good | {"rows": 5},
    ):
        with pytest.raises(TrafficError):
            TrafficProfile.from_json(broken)


def test_requests_carry_the_profiles_sampling_and_a_seed_of_their_own() -> None:
    profile = profile_from_form(FORM | {"temperature": 0.7, "top_p": "0.95"})
    shapes = profile.sample(50, seed=3)
    assert {(s.temperature, s.top_p) for s in shapes} == {(0.7, 0.95)} and len({s.seed for s in shapes}) == 50
    assert shapes[0].sampling() == {"temperature": 0.7, "top_p": 0.95, "seed": shapes[0].seed}
    assert shapes == profile.sample(50, seed=3)
    greedy = profile.sampled(0.0).sample(50, seed=3)
    assert greedy[0].sampling() == {"temperature": 0.0}
    assert [(s.isl, s.osl) for s in greedy] == [(s.isl, s.osl) for s in shapes], "lengths do not depend on it"


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (profile_from_form(FORM), "the traffic does not say how its requests sample: they are greedy, which flatters drafts"),
        (profile_from_form(FORM).sampled(0), "requests are greedy (temperature 0)"),
        (profile_from_form(FORM).sampled(0.7, 0.95), "requests sample at temperature 0.7, top-p 0.95"),
        (presets()["demo"], "requests sample at temperature 0.2, top-p 0.9"),
        (presets()["demo"].sampled(None, 0.5), "requests sample at temperature 0.2, top-p 0.5"),
        (presets()["demo"].sampled(0), "requests are greedy (temperature 0)"),
        (presets()["azure-conv"], "the traffic does not say how its requests sample: they are greedy, which flatters drafts"),
    ],
)  # fmt: skip
def test_a_profile_says_how_its_requests_sample_and_whether_anybody_told(profile, says) -> None:
    assert profile.sampling_text == says


@pytest.mark.parametrize(
    ("temperature", "top_p", "says"),
    [(2.1, None, "Temperature is 2.1"), (-1, None, "Temperature is -1"), (0.7, 0, "Top_p is 0"), (1, 1.1, "Top_p is 1.1"),
     (0, 0.9, "does nothing at temperature 0"), (0, 0, "Top_p is 0"),
     (None, 0.9, "does nothing at temperature 0"), (float("nan"), None, "Temperature is nan")],
)  # fmt: skip
def test_sampling_that_cannot_be_is_named(temperature, top_p, says) -> None:
    with pytest.raises(TrafficError, match=says):
        profile_from_form(FORM).sampled(temperature, top_p)


def test_a_trace_gives_rows_of_two_windows_apart_in_time() -> None:
    profile = a_trace()
    search, heldout = (set(profile.rows[w]) for w in ("search", "heldout"))
    assert not search & heldout and max(search) < min(heldout)
    assert (len(search), len(heldout)) == (200, 100)
    assert profile.request_rate == pytest.approx(2.0) and profile.source == "mooncake"
    # every request but the first begins with block 0, which is 512 tokens
    assert profile.shared_prefix == SharedPrefix(pytest.approx(299 / 300, abs=1e-4), 512, 8)
    assert {(s.isl, s.osl) for s in profile.sample(50, 1, "search")} <= search
    assert {(s.isl, s.osl) for s in profile.sample(500, 1, "heldout")} == heldout


def test_sampling_is_repeatable_and_its_windows_differ() -> None:
    profile = presets()["demo"]
    draws = {(seed, w): profile.sample(40, seed, w) for seed in (1, 2) for w in ("search", "heldout")}
    assert draws[1, "search"] == profile.sample(40, 1, "search")
    assert len({tuple(d) for d in draws.values()}) == 4
    with pytest.raises(TrafficError, match="Window"):
        profile.sample(1, 1, "test")


def test_samples_follow_the_quantiles_and_any_short_run_of_them_is_typical() -> None:
    profile = presets()["azure-conv"]
    shapes = profile.sample(4000, 3, "heldout")
    for name, values in (("isl", [s.isl for s in shapes]), ("osl", [s.osl for s in shapes])):
        for level in (0.25, 0.5, 0.75, 0.95):
            assert np.quantile(values, level) == pytest.approx(profile.quantile(name, level), rel=0.05)
    demo = presets()["demo"]
    osl = [s.osl for s in demo.sample(80, 5, "heldout")]
    sums = [sum(osl[i : i + 8]) for i in range(0, 80, 8)]
    assert max(sums) / min(sums) < 1.15


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    profile = replace(presets()["demo"], request_rate=5.0, arrival_cv=2.0)
    gaps = np.diff([s.at for s in profile.sample(20000, 7, "search")])
    assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.05)
    assert {s.at for s in presets()["demo"].sample(10, 1)} == {0.0}, "a closed loop has no arrival times"


def test_shared_prefixes_have_the_share_the_groups_and_leave_a_token_of_the_requests_own() -> None:
    profile = replace(presets()["demo"], shared_prefix=SharedPrefix(0.5, 100, 3))
    shapes = profile.sample(2000, 1, "search")
    sharing = [s for s in shapes if s.prefix_group >= 0]
    assert len(sharing) / len(shapes) == pytest.approx(0.5, abs=0.04)
    assert {s.prefix_group for s in sharing} == {0, 1, 2} and all(s.prefix_len < s.isl for s in sharing)
    assert all(s.prefix_len == 0 for s in shapes if s.prefix_group < 0)


def test_requests_over_the_context_are_clipped_in_proportion_and_counted() -> None:
    assert clip(300, 100, 200) == (150, 50) and clip(30, 10, 200) == (30, 10) and clip(10**6, 1, 100) == (99, 1)
    profile = presets()["azure-conv"].clipped(1024)
    shapes = profile.sample(300, 1, "heldout")
    assert max(s.isl + s.osl for s in shapes) == 1024 and "clipped in proportion" in profile.notes[-1]
    assert presets()["demo"].clipped(8192).notes == ()
    assert all(s.isl + s.osl <= 64 for s in presets()["demo"].sample(20, 1, max_context=64))


def test_a_burst_doubles_the_prompts_and_stable_traffic_has_one_shape() -> None:
    profile = replace(presets()["demo"], request_rate=3.0)
    assert (profile.burst().concurrency, profile.burst().request_rate) == (8, 6.0)
    stable = profile.stable().sample(20, 1, "heldout")
    assert {(s.isl, s.osl) for s in stable} == {(128, 128)}
    assert {round(b.at - a.at, 6) for a, b in pairwise(stable)} == {round(1 / 3, 6)}


def test_a_rate_scaled_to_capacity_says_so() -> None:
    profile = presets()["azure-code"].scaled_to(capacity=1.0, share=0.8)
    assert profile.request_rate == 0.8 and profile.notes[-1].startswith(
        "arrivals scaled to 80% of the measured capacity"
    )


def test_traffic_is_named_by_preset_or_file(tmp_path) -> None:
    assert load_traffic("demo").name == "demo" and load_traffic("demo", concurrency=9).concurrency == 9
    (tmp_path / "p.json").write_text(json.dumps(profile_from_form(FORM).to_json()))
    assert load_traffic(str(tmp_path / "p.json")).name == "chat"
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,5,5\n2023-01-01 00:00:02,7,7"
    )
    assert load_traffic(str(tmp_path / "t.csv")).request_rate == 0.5
    with pytest.raises(TrafficError, match="no traffic 'nothing': name a preset \\(demo, "):
        load_traffic("nothing")
    for text, says in (("{", "not JSON"), ("[1]", "one JSON object")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(TrafficError, match=says):
            load_traffic(str(tmp_path / "bad.json"))


def test_traffic_is_read_with_another_sampling_than_its_own() -> None:
    assert load_traffic("demo", temperature=0.7).sampling_text == "requests sample at temperature 0.7, top-p 0.9"
    assert load_traffic("azure-code", 8, 1.0, 0.95).temperature == 1.0
    assert load_traffic("demo").temperature == 0.2


def test_the_demo_preset_is_short_chat_of_four_users() -> None:
    demo = presets()["demo"]
    assert (demo.quantile("isl", 0.5), demo.quantile("osl", 0.5), demo.concurrency) == (128, 128, 4)
    assert all(p.attribution for p in presets().values())
