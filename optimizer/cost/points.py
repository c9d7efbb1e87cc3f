"""Published serving points as deployments. The file is not part of the product; only what was fitted on it is.

Two readings of its columns, both found in the rows themselves:
- rows named `tp8_ep8` are there twice, once with tensor parallelism 8 and once with 8 x 8: eight devices either way;
- rows of more than eight devices are racks: attention by rank, experts over all, prompts prefilled apart (their TPOT stays
  the same while the load grows thirtyfold).
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.hardware import Datasheet, datasheets
from optimizer.cost.architecture import published
from optimizer.cost.deployment import Deployment

SYSTEMS = {
    "h100_sxm": "NVIDIA H100 SXM",
    "h200_sxm": "NVIDIA H200 SXM",
    "b200_sxm": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "b300_sxm": "NVIDIA B300",
    "gb300": "NVIDIA GB300",
}
FORMATS = {"": "bfloat16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4"}
NODE = 8  # devices
COLUMNS = (
    "id", "backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "moe_quant_mode", "batch_size",
    "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip


class PointsError(ValueError):
    """The file cannot be read as serving points; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: seconds. `weight` is its share of a vote, for the file holds many points more than once."""

    id: str
    deployment: Deployment
    ttft_s: float
    tpot_s: float
    weight: float = 1.0


def read_points(path: Path) -> list[Point]:
    """All aggregated points. Raises PointsError."""
    try:
        rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise PointsError(f"{path} cannot be read ({error}): give the CSV of serving points.") from error
    missing = [c for c in COLUMNS if not rows or c not in rows[0]]
    if missing:
        raise PointsError(f"{path} has no column {missing[0]!r}: give the CSV of serving points.")
    sheets = datasheets()
    return weighed(_point(row, sheets) for row in rows if row["mode"] == "agg")


def weighed(points: Iterable[Point]) -> list[Point]:
    """Points with votes: copies of a measurement share one, and a crowded (device, model) counts by its square root."""
    found = list(points)
    copies = Counter(map(_measurement, found))
    groups: Counter[tuple[str, str]] = Counter()
    for p in found:
        groups[p.deployment.device.name, p.deployment.model.name] += 1 / copies[_measurement(p)]
    return [
        Point(
            p.id,
            d := p.deployment,
            p.ttft_s,
            p.tpot_s,
            groups[d.device.name, d.model.name] ** -0.5 / copies[_measurement(p)],
        )
        for p in found
    ]


def _measurement(point: Point) -> tuple[str, str, float, float]:
    return point.deployment.device.name, point.deployment.model.name, point.ttft_s, point.tpot_s


def _point(row: Mapping[str, str], sheets: Mapping[str, Datasheet]) -> Point:
    try:
        tensor, ranks, concurrency = _layout(row)
        experts = FORMATS[row["moe_quant_mode"]]
        deployment = Deployment(
            device=sheets[SYSTEMS[row["system"]]],
            model=published()[architecture_name(row["model_path"])],
            framework=row["backend"],
            isl=int(row["isl"]),
            osl=int(row["osl"]),
            concurrency=concurrency,
            weights=experts,
            kv="bfloat16" if experts == "bfloat16" else "fp8",
            tensor=tensor,
            ranks=ranks,
            expert_parallel=_whole(row, "moe_ep_size") > 1,
            prefill_apart=tensor * ranks > NODE,
        )
        return Point(row["id"], deployment, float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3)
    except (KeyError, ValueError) as error:
        raise PointsError(f"point {row['id']} cannot be read: {error}") from error


def architecture_name(path: str) -> str:
    """The published architecture of a model's path: quantised copies, and DeepSeek's R1 and V3.1, share one."""
    name = path.split("/")[-1]
    for known in published():
        if known in name:
            return known
    if name.startswith("DeepSeek-"):
        return "DeepSeek-V3"
    raise KeyError(f"no sizes are kept for {path}")


def _layout(row: Mapping[str, str]) -> tuple[int, int, int]:
    """Devices that share matrices, ranks, and requests at once, of one replica."""
    tensor, ranks, batch = (_whole(row, c) for c in ("tp_size", "attention_dp_size", "batch_size"))
    slices, parts = _whole(row, "moe_tp_size"), _whole(row, "moe_ep_size")
    named = re.search(r"_c(\d+)_", row["id"])
    if not row["attention_dp_size"]:
        tensor = max(tensor, slices * parts)  # some rows count the devices of the experts alone
        if named and tensor > 1 and int(named[1]) == batch * tensor:
            tensor, ranks = 1, tensor  # a batch for each device
    concurrency = batch * ranks
    if row["attention_dp_size"] and slices > 1 and slices == parts and tensor * ranks == slices * parts:
        tensor, ranks = (1, slices) if ranks > 1 else (slices, 1)
    elif ranks > 1 and tensor == ranks and parts == tensor * ranks:
        tensor = 1
    elif tensor > NODE:
        tensor, ranks = 1, tensor
    return tensor, ranks, concurrency


def _whole(row: Mapping[str, str], column: str) -> int:
    """The column's number; empty and 0 both stand for 1 there."""
    return int(row[column] or 1) or 1
