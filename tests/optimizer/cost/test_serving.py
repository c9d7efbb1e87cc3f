"""Serving estimates from specifications: what they may call themselves, what they never do, and how they move."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kernels.hardware import datasheets
from optimizer.cost.architecture import published
from optimizer.cost.deployment import Deployment, DeploymentError
from optimizer.cost.serving import COEFFICIENTS, fitted_model, from_json
from optimizer.records import Provenance


def served(**changes: Any) -> Deployment:
    fields = {
        "device": datasheets()["NVIDIA H200 SXM"], "model": published()["Llama-3.1-70B"], "framework": "vllm",
        "isl": 1024, "osl": 1024, "concurrency": 16, "weights": "fp8", "kv": "fp8", "tensor": 4,
    }  # fmt: skip
    return Deployment(**fields | changes)


def test_within_what_was_fitted_it_is_an_estimate() -> None:
    found = fitted_model().estimate(served())
    assert found.provenance is Provenance.ESTIMATED and found.reasons == ()
    assert found.ttft_low < found.ttft_s < found.ttft_high and found.tpot_low < found.tpot_s < found.tpot_high
    assert found.tpot_s > found.roofline_tpot_s and found.ttft_s > found.roofline_ttft_s
    assert 0.006 < found.tpot_s < 0.016, "the published point says 10.9 ms"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"isl": 100_000}, "tokens in"),
        ({"osl": 50_000}, "tokens out"),
        ({"concurrency": 20_000}, "requests a rank"),
        ({"weights": "int4", "device": datasheets()["NVIDIA H100 SXM"]}, "int4"),
        ({"model": published()["Kimi-K2.5"], "tensor": 128}, "devices"),
    ],
)
def test_outside_it_says_so_and_is_less_sure(changes: dict[str, Any], named: str) -> None:
    found, usual = fitted_model().estimate(served(**changes)), fitted_model().estimate(served())
    assert found.provenance is Provenance.EXTRAPOLATED and any(named in r for r in found.reasons), found.reasons
    assert found.tpot_high / found.tpot_s > usual.tpot_high / usual.tpot_s


@pytest.mark.parametrize("name", ["AWS Trainium2", "NVIDIA GB300", "AMD Instinct MI300X"])
def test_a_device_without_points_is_unvalidated(name: str) -> None:
    found, usual = fitted_model().estimate(served(device=datasheets()[name])), fitted_model().estimate(served())
    assert found.provenance is Provenance.UNVALIDATED and name in found.reasons[0]
    assert found.tpot_high / found.tpot_low > usual.tpot_high / usual.tpot_low


def test_a_framework_without_points_is_unvalidated_and_as_fast_as_they_are_on_average() -> None:
    found = fitted_model().estimate(replace(served(), framework="another"))
    assert found.provenance is Provenance.UNVALIDATED and "another" in found.reasons[0]
    known = [fitted_model().estimate(replace(served(), framework=f)).tpot_s for f in ("vllm", "trtllm", "sglang")]
    assert min(known) < found.tpot_s < max(known)


def test_more_work_is_never_faster_and_a_better_device_never_slower() -> None:
    model, before = fitted_model(), fitted_model().estimate(served())
    for change in ({"isl": 4096}, {"concurrency": 64}, {"weights": "bfloat16"}):
        after = model.estimate(served(**change))
        assert after.tpot_s >= before.tpot_s and after.ttft_s > before.ttft_s, change
    better = replace(served().device, read_gbs=9600, gemm_fp8_flops=4e15, gemm_bf16_flops=2e15)
    after = model.estimate(served(device=better))
    assert after.tpot_s < before.tpot_s and after.ttft_s < before.ttft_s


def test_it_never_beats_its_roofline() -> None:
    for name, model in published().items():
        for device in datasheets().values():
            for load in (1, 64):
                d = Deployment(device, model, "vllm", 2048, 512, load, weights="fp8", kv="fp8", tensor=8, ranks=2)
                if d.fits:
                    found = fitted_model().estimate(d)
                    assert found.tpot_s >= found.roofline_tpot_s, (name, device.name)
                    assert found.ttft_s >= found.roofline_ttft_s, (name, device.name)


def test_weights_that_do_not_fit_are_refused_with_the_mend() -> None:
    with pytest.raises(DeploymentError, match="more devices or fewer bits"):
        fitted_model().estimate(served(model=published()["DeepSeek-V3"]))


def test_what_is_kept_says_where_it_comes_from() -> None:
    kept = json.loads(COEFFICIENTS.read_text())["provenance"]
    assert kept["licence"] == "Apache-2.0" and "aiconfigurator" in kept["attribution"] and kept["date"]
    assert kept["points"] == sum(kept["by_device"].values()) > kept["distinct"]


def test_coefficients_of_other_terms_are_refused() -> None:
    kept = json.loads(COEFFICIENTS.read_text())["model"]
    with pytest.raises(ValueError, match="fit again"):
        from_json(kept | {"tpot_terms": kept["tpot_terms"][1:]})
