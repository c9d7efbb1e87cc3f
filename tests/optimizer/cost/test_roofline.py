"""Bytes and floors of a step against figures worked out by hand for the tiny model.

Hidden 64, feed-forward 128, 4 heads and 2 KV heads of 16, 2 layers, vocabulary 512. A layer's matrices hold
64 x (64 + 32 + 32 + 64 + 3 x 128) = 36,864 numbers, the head 32,768; a token's keys and values 2 x 2 x 16 a layer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from engine.models.config import ModelConfig
from optimizer.cost.roofline import (
    DEFAULTS,
    Ceilings,
    Workload,
    cache_share,
    floors,
    step_bytes,
    weight_share,
    weights_read,
)

WORK = Workload(concurrency=2, isl=20, osl=8, prefill_tokens=20)  # a decode step's context is 24 on average
BUSY = Ceilings(read=1e10, copy=5e9, gemm=1e9, measured=True)  # so few operations that they decide
STARVED = Ceilings(read=1e9, copy=5e9, gemm=1e15, measured=True)  # so few bytes that they decide
US = 1e-6


def test_weights_and_bytes_of_a_step(tiny_config: ModelConfig) -> None:
    assert weights_read(tiny_config) == 2 * 36_864
    assert step_bytes(tiny_config, "bfloat16") == 2 * (2 * 36_864 + 32_768) == 212_992
    assert step_bytes(tiny_config, "float32") == 425_984
    assert step_bytes(tiny_config, "float32", layers=1) == 4 * (36_864 + 32_768)


def test_bytes_of_a_step_are_the_matrices_in_the_file(tiny_config: ModelConfig, tiny_model: Path) -> None:
    with safe_open(tiny_model / "model.safetensors", "np") as file:
        matrices = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert step_bytes(tiny_config, "float32") == sum(m.nbytes for m in matrices if m.ndim == 2)


def test_floors_where_operations_decide(tiny_config: ModelConfig) -> None:
    found = floors(tiny_config, "float32", BUSY, WORK)
    decode = {"projections": 294.912, "head": 131.072, "attention": 24.576, "cache": 0.2048, "pointwise": 0.0}
    prefill = {"projections": 2949.12, "head": 65.536, "attention": 102.4, "cache": 2.048, "pointwise": 0.0}
    assert found["decode"] == pytest.approx({op: us * US for op, us in decode.items()})
    assert found["prefill"] == pytest.approx({op: us * US for op, us in prefill.items()})


def test_floors_where_bytes_decide(tiny_config: ModelConfig) -> None:
    found = floors(tiny_config, "float32", STARVED, WORK)
    decode = {"projections": 294.912, "head": 131.072, "attention": 24.576, "cache": 0.2048, "pointwise": 0.0}
    prefill = {"projections": 294.912, "head": 131.072, "attention": 5.12, "cache": 2.048, "pointwise": 0.0}
    assert found["decode"] == pytest.approx({op: us * US for op, us in decode.items()})
    assert found["prefill"] == pytest.approx({op: us * US for op, us in prefill.items()})
    half = floors(tiny_config, "bfloat16", STARVED, WORK)
    assert half["decode"]["projections"] == pytest.approx(found["decode"]["projections"] * 2 / 4)


def test_a_request_is_its_share_of_steps() -> None:
    work = Workload(4, isl=100, osl=40, prefill_tokens=50, step_s={"prefill": 0.3, "decode": 0.02})
    assert work.context == 120
    assert work.weights() == {"prefill": 2.0, "decode": 10.0}
    assert work.request_s(work.step_s) == pytest.approx(0.8)
    assert work.prefill_share == pytest.approx(0.75)


def test_ceilings_are_those_of_the_dtype_and_the_best_of_several_sizes() -> None:
    found = {"read_gbs": 20, "copy_gbs": {"1": 8.0, "64": 11.0}, "gemm_bf16_flops": 3e11, "gemm_f32_flops": 1e11}
    assert Ceilings.of(found, "bfloat16") == Ceilings(20e9, 11e9, 3e11, True)
    assert Ceilings.of(found, "float32").gemm == 1e11


@pytest.mark.parametrize("missing", ["read_gbs", "copy_gbs", "gemm_f32_flops"])
def test_a_ceiling_that_was_not_measured_is_a_cautious_default_that_says_so(missing: str) -> None:
    found = {"read_gbs": 20.0, "copy_gbs": 11.0, "gemm_f32_flops": 1e12}
    ceilings = Ceilings.of({k: v for k, v in found.items() if k != missing}, "float32")
    assert not ceilings.measured
    attribute, scale = {"read_gbs": ("read", 1e9), "copy_gbs": ("copy", 1e9), "gemm_f32_flops": ("gemm", 1)}[missing]
    assert getattr(ceilings, attribute) == DEFAULTS[missing] * scale
    assert DEFAULTS[missing] < found[missing]


def test_no_ceilings_at_all_are_no_error() -> None:
    assert not Ceilings.of({"missing": "measuring failed"}, "bfloat16").measured


def test_integer_weights_have_a_lower_floor(tiny_config: ModelConfig) -> None:
    same = floors(tiny_config, "bfloat16", STARVED, WORK)["decode"]
    for precision, share in (("coded", 0.75), ("int8", 0.5), ("int4", 0.25)):
        assert weight_share(precision, "bfloat16") == share
        found = floors(tiny_config, "bfloat16", STARVED, WORK, precision)["decode"]
        assert found["head"] == pytest.approx(share * same["head"]) and found["attention"] == same["attention"]
    assert weight_share("int8", "float32") == 0.25 and weight_share("same", "float32") == 1.0


def test_a_cache_of_integers_has_a_lower_floor_and_leaves_the_weights_theirs(tiny_config: ModelConfig) -> None:
    whole, found, both = (
        floors(tiny_config, "bfloat16", STARVED, WORK, precision)["decode"]
        for precision in ("same", "kv-int8", "int8+kv-int8")
    )
    assert cache_share("kv-int8", "bfloat16") == 0.5 and cache_share("int8", "bfloat16") == 1.0
    assert weight_share("kv-int8", "bfloat16") == 1.0 and weight_share("int8+kv-int8", "bfloat16") == 0.5
    for operator in ("attention", "cache"):
        assert found[operator] == both[operator] == pytest.approx(whole[operator] / 2)
    assert found["head"] == whole["head"] and both["head"] == pytest.approx(whole["head"] / 2)
    assert found["attention"] == pytest.approx(2 * 24 * (2 * 2 * 16) * 2 * 1e-9)  # sequences, context, bytes, layers


def test_only_a_program_that_declares_coded_weights_may_read_fewer_bytes(tiny_config: ModelConfig) -> None:
    numbers = tiny_config.vocab_size * tiny_config.hidden_size
    for precision, size in (("same", 2.0), ("coded", 1.5)):
        found = floors(tiny_config, "bfloat16", STARVED, WORK, precision)["decode"]
        assert found["head"] == pytest.approx(size * numbers / STARVED.read)
