"""InferenceX's results are read as they are published, and a wrong file is refused with the row and field."""

from __future__ import annotations

import json

import pytest

from optimizer.published import UNSTATED, PublishedError, read_published
from tests.paths import SHARED

AGGREGATED = {
    "hw": "h200", "tp": 8, "conc": 16, "model": "org/big-model", "framework": "vllm", "precision": "fp8",
    "tput_per_gpu": 900.0, "output_tput_per_gpu": 450.0, "median_ttft": 0.2, "median_tpot": 0.02, "median_intvty": 50.0,
}  # fmt: skip
RAW = {
    "model_id": "org/big-model",
    "max_concurrency": 4,
    "output_throughput": 71.0,
    "median_tpot": 0.05,
    "median_ttft": 1.5,
}


def test_an_aggregated_result_names_its_hardware() -> None:
    (point,) = read_published(json.dumps(AGGREGATED))
    assert (point.hardware, point.devices, point.conc, point.per_device) == ("h200", 8, 16, True)
    assert (point.output_tput, point.interactivity, point.median_ttft) == (450.0, 50.0, 0.2)
    assert point.label == "h200 · big-model · fp8 · vllm"


def test_a_benchmarks_own_result_does_not_and_says_so() -> None:
    (point,) = read_published(json.dumps(RAW))
    assert point.hardware == UNSTATED and point.devices is None and not point.per_device
    assert point.interactivity == pytest.approx(20.0)


def test_milliseconds_are_read_as_such() -> None:
    row = {k: v for k, v in RAW.items() if k not in ("median_tpot", "median_ttft")}
    (point,) = read_published(json.dumps(row | {"median_tpot_ms": 50.0, "median_ttft_ms": 1500.0}))
    assert point.interactivity == pytest.approx(20.0) and point.median_ttft == pytest.approx(1.5)


@pytest.mark.parametrize(
    "text", [json.dumps([AGGREGATED, RAW]), json.dumps(AGGREGATED) + "\n\n" + json.dumps(RAW) + "\n"]
)
def test_a_list_and_a_result_a_line_are_the_same(text: str) -> None:
    assert [p.conc for p in read_published(text)] == [16, 4]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no results"),
        ("[]", "no results"),
        ("{not json", "Line 1 is not JSON"),
        (json.dumps([AGGREGATED, 3]), "Result 2 is not an object"),
        (json.dumps(RAW | {"output_throughput": "many"}), "Result 1 needs output_throughput"),
        (json.dumps(RAW | {"median_tpot": 0}), "Result 1 needs median_tpot"),
        (json.dumps({"a": 1}), "Result 1 needs output_throughput"),
        (json.dumps([RAW] * 5001), "at most 5000"),
        (json.dumps(RAW | {"max_concurrency": float("nan")}), "max_concurrency"),
        (json.dumps(RAW | {"median_tpot": None}), "median_tpot"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_expected(text: str, says: str) -> None:
    with pytest.raises(PublishedError, match=says):
        read_published(text)


def test_what_was_really_published_is_read_whole() -> None:
    path = SHARED / "truth" / "inferencex_token_position_results.jsonl"
    if not path.exists():
        pytest.skip("the published results are not here")
    points = read_published(path.read_text())
    assert len(points) == 169 and all(p.output_tput > 0 and p.interactivity > 0 for p in points)
