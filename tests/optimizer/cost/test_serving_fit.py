"""The fit finds what was planted, keeps to its bounds, and on published points does what the product says of it."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from optimizer.cost.architecture import published
from optimizer.cost.points import Point, read_points, weighed
from optimizer.cost.serving import COEFFICIENTS, TPOT_TERMS, TTFT_TERMS, Blend, ServingModel, tpot_terms, ttft_terms
from optimizer.cost.serving_fit import HeldOut, devices, fit, hold_out, main, models, summary, tpot_bounds, ttft_bounds
from tests.optimizer.cost.serving_support import DENSE, DEVICE, SPARSE, deployment
from tests.paths import SHARED

PUBLISHED = SHARED / "truth" / "measured_serving_points.csv"


def planted(noise: float = 0.0) -> list[Point]:
    """Points of a machine with known coefficients: bytes take 1.6 times as long, a layer 40 us, TensorRT-LLM 0.8 of it."""
    tpot = {"dense": 1.6, "experts": 1.6, "context": 2.0, "layers": 40.0}
    ttft = {"dense": 1.8, "experts": 1.8, "attention": 1.5, "load_dense": 0.1, "load_experts": 0.1, "tpot": 1.0}
    truth = ServingModel(
        Blend(tuple(tpot.get(t, b[0]) for t, b in zip(TPOT_TERMS, tpot_bounds(), strict=True)), (1.0, 0.8, 1.0)),
        Blend(tuple(ttft.get(t, b[0]) for t, b in zip(TTFT_TERMS, ttft_bounds(), strict=True)), (1.0, 1.0, 1.0)),
        {}, {}, (), {},
    )  # fmt: skip
    shapes = product((DENSE, SPARSE), (200, 2000), (1, 8, 64), (1, 4), ("sglang", "trtllm"), ("bfloat16", "fp8"))
    names = ("model", "isl", "concurrency", "tensor", "framework", "weights")
    found = [deployment(**dict(zip(names, s, strict=True))) for s in shapes]
    ttfts, tpots = truth.times(found)
    off = random.Random(5)
    return weighed(
        Point(str(i), d, float(a) * off.lognormvariate(0, noise), float(b) * off.lognormvariate(0, noise))
        for i, (d, a, b) in enumerate(zip(found, ttfts, tpots, strict=True))
    )


def test_it_finds_what_was_planted() -> None:
    points = planted(noise=0.05)
    found = fit(points)
    ttft, tpot = found.times([p.deployment for p in points])
    assert np.median(np.abs(tpot / [p.tpot_s for p in points] - 1)) < 0.06
    assert np.median(np.abs(ttft / [p.ttft_s for p in points] - 1)) < 0.1
    assert dict(zip(TPOT_TERMS, found.tpot.coefficients, strict=True))["dense"] == pytest.approx(1.6, rel=0.25)
    assert found.tpot.factors[1] == pytest.approx(0.8, abs=0.08)
    assert found.formats == {DEVICE.name: ["bfloat16", "fp8"]} and found.frameworks == ["sglang", "trtllm"]
    assert found.ranges["tokens in"].low == 200 and found.ranges["tokens in"].outside(2100)


def test_no_coefficient_of_bytes_or_operations_is_below_one() -> None:
    impossible = [Point(p.id, p.deployment, p.ttft_s / 50, p.tpot_s / 50, p.weight) for p in planted()]
    found = fit(impossible)
    for terms, blend in ((TPOT_TERMS, found.tpot), (TTFT_TERMS, found.ttft)):
        kept = dict(zip(terms, blend.coefficients, strict=True))
        assert kept["dense"] >= 1 and kept["experts"] >= 1 and kept["exchange"] >= 1


def test_a_held_out_model_is_predicted_without_its_own_points() -> None:
    points = planted()
    spoilt = [
        Point(p.id, d := p.deployment, p.ttft_s, p.tpot_s * (9 if d.model is SPARSE else 1), p.weight) for p in points
    ]
    clean, found = hold_out(points), hold_out(spoilt)
    sparse = found.of(model="sparse")
    assert found.tpot[sparse] == pytest.approx(clean.tpot[sparse]), "its own spoilt points changed nothing"
    assert found.tpot[~sparse] != pytest.approx(clean.tpot[~sparse])
    assert np.median(found.errors("tpot", model="sparse")) > 0.8, "and are seen to be wrong"


@cache
def checked() -> HeldOut:
    if not PUBLISHED.is_file():
        pytest.skip(f"the published points are not at {PUBLISHED}")
    return hold_out(read_points(PUBLISHED))


def test_held_out_errors_are_at_most_half_of_a_plain_rooflines_on_every_device() -> None:
    found = summary(checked())
    assert sum(row["points"] for row in found.values()) == 3619 and len(found) == 5
    for device, row in found.items():
        for what in ("ttft", "tpot"):
            assert row[what] <= 0.5 * row[f"{what}_roofline"], (device, what, row)


def test_what_is_kept_is_what_the_command_makes(tmp_path: Path) -> None:
    held_out = checked()
    kept = json.loads(COEFFICIENTS.read_text())
    assert kept["provenance"]["models"] == models(held_out.points) and set(kept["held_out"]) == set(
        devices(held_out.points)
    )
    for device, row in summary(held_out).items():
        assert kept["held_out"][device] == pytest.approx(row, rel=0.02)
    again = fit(held_out.points)
    assert kept["model"]["tpot"]["coefficients"] == pytest.approx(again.tpot.coefficients, rel=0.05, abs=0.02)


def test_intervals_hold_four_of_five_held_out_points() -> None:
    held_out = checked()
    spreads = held_out.spreads()
    for what in ("ttft", "tpot"):
        inside = []
        for p, predicted in zip(held_out.points, getattr(held_out, what), strict=True):
            low, high = spreads[p.deployment.device.name][what]
            inside.append(low <= np.log(getattr(p, f"{what}_s") / predicted) <= high)
        assert 0.78 < np.mean(inside) < 0.82


def test_no_published_point_is_outside_of_what_was_fitted() -> None:
    held_out = checked()
    again = fit(held_out.points)
    assert {again.worth(p.deployment)[0] for p in held_out.points} == {"estimated"}
    assert set(published()) == set(models(held_out.points))


def test_the_command_writes_what_a_small_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not PUBLISHED.is_file():
        pytest.skip(f"the published points are not at {PUBLISHED}")
    lines = PUBLISHED.read_text().splitlines()
    small, out = tmp_path / "points.csv", tmp_path / "kept.json"
    small.write_text("\n".join([lines[0], *(line for line in lines[1:] if "llama" in line)][:400]) + "\n")
    main([str(small), "--out", str(out)])
    kept = json.loads(out.read_text())
    assert 200 < kept["provenance"]["points"] < 400 and "points.csv" in kept["provenance"]["command"]
    assert "roofline" in capsys.readouterr().out


def test_terms_have_the_names_they_are_kept_by() -> None:
    d = deployment()
    assert len(tpot_terms(d)) == len(TPOT_TERMS) == len(tpot_bounds())
    assert len(ttft_terms(d, 0.01)) == len(TTFT_TERMS) == len(ttft_bounds())
    assert dict(zip(TPOT_TERMS, tpot_terms(d), strict=True))["context"] == d.decode().context
    assert dict(zip(TTFT_TERMS, ttft_terms(d, 0.01), strict=True))["tpot"] == 0.01
