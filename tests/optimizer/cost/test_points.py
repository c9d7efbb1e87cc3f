"""How rows of published points are read: the layouts that the file has two names for, copies, and what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.cost.points import COLUMNS, Point, PointsError, architecture_name, read_points, weighed
from tests.optimizer.cost.serving_support import deployment

ROW = {
    "id": "a_agg_1024x1024_c64_tp8_ep1", "backend": "vllm", "model_path": "meta-llama/Llama-3.1-70B", "system": "h200_sxm",
    "mode": "agg", "isl": "1024", "osl": "512", "gemm_quant_mode": "fp8", "moe_quant_mode": "fp8", "batch_size": "64",
    "tp_size": "8", "attention_dp_size": "1", "moe_tp_size": "8", "moe_ep_size": "1", "silicon_ttft_ms": "500",
    "silicon_tpot_ms": "10",
}  # fmt: skip


def read(folder: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> list[Point]:
    path = folder / "points.csv"
    path.write_text("\n".join([",".join(columns), *(",".join((ROW | r)[c] for c in columns) for r in rows)]) + "\n")
    return read_points(path)


def test_a_row_is_a_deployment_in_seconds(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {})
    d = found.deployment
    assert (found.ttft_s, found.tpot_s) == (0.5, 0.01)
    assert (d.device.name, d.model.name, d.framework) == ("NVIDIA H200 SXM", "Llama-3.1-70B", "vllm")
    assert (d.isl, d.osl, d.concurrency, d.tensor, d.ranks, d.weights) == (1024, 512, 64, 8, 1, "fp8")


def test_rows_of_disaggregated_serving_are_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, {"mode": "disagg", "tp_size": ""}) == []


@pytest.mark.parametrize(
    ("columns", "layout"),  # tensor, ranks, concurrency
    [
        ({"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, (8, 1, 64)),
        ({"tp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}, (8, 1, 64)),
        (
            {"tp_size": "1", "attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8", "batch_size": "2"},
            (1, 8, 128),
        ),
        (
            {"tp_size": "1", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8", "batch_size": "16"},
            (1, 8, 128),
        ),
        (
            {"tp_size": "4", "attention_dp_size": "4", "moe_tp_size": "1", "moe_ep_size": "16", "batch_size": "16"},
            (1, 4, 64),
        ),
        ({"tp_size": "36", "moe_tp_size": "36"}, (1, 36, 64)),
        (
            {"tp_size": "8", "attention_dp_size": "", "moe_tp_size": "1", "moe_ep_size": "8", "batch_size": "8"},
            (1, 8, 64),
        ),
        ({"tp_size": "8", "attention_dp_size": "", "moe_tp_size": "1", "moe_ep_size": "8"}, (8, 1, 64)),
        ({"tp_size": "1", "attention_dp_size": "", "moe_tp_size": "4", "batch_size": "5"}, (4, 1, 5)),
        (
            {"tp_size": "2", "attention_dp_size": "0", "moe_tp_size": "0", "moe_ep_size": "0", "batch_size": "8"},
            (2, 1, 8),
        ),
    ],
)
def test_layouts_with_two_names_are_one(tmp_path: Path, columns: dict[str, str], layout: tuple[int, int, int]) -> None:
    (found,) = read(tmp_path, columns)
    d = found.deployment
    assert (d.tensor, d.ranks, d.concurrency) == layout
    assert d.prefill_apart == (d.devices > 8)


def test_copies_share_a_vote_and_a_crowd_counts_by_its_root() -> None:
    a, b = deployment(), deployment(concurrency=3)
    found = weighed([Point("1", a, 1.0, 2.0), Point("1 again", a, 1.0, 2.0), Point("2", b, 3.0, 4.0)])
    assert [p.weight * 2**0.5 for p in found] == pytest.approx([0.5, 0.5, 1.0])


def test_quantised_copies_and_later_training_share_an_architecture() -> None:
    names = ("deepseek-ai/DeepSeek-R1", "nvidia/DeepSeek-V3.1-NVFP4", "deepseek-ai/DeepSeek-V3")
    assert {architecture_name(n) for n in names} == {"DeepSeek-V3"}
    assert architecture_name("nvidia/Llama-3.1-8B-Instruct-FP8") == "Llama-3.1-8B"


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(PointsError, match="tpot"):
        read(tmp_path, {}, columns=COLUMNS[:-1])
    with pytest.raises(PointsError, match="a_agg_1024x1024_c64_tp8_ep1"):
        read(tmp_path, {"isl": "long"})
    with pytest.raises(PointsError, match="no sizes are kept for some/Model"):
        read(tmp_path, {"model_path": "some/Model"})
    with pytest.raises(PointsError, match="cannot be read"):
        read_points(tmp_path / "nowhere.csv")
