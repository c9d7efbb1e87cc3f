"""Every product under the interpreter: odd shapes, both tile sizes, biases, quantised weights, the head and its argmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import registry
from kernels.fp8_matmul import reference as fp8
from kernels.fp8_matmul.triton import fp8_linear, quantise_fp8, quantise_rows
from kernels.gated_mlp import reference as mlp
from kernels.gated_mlp.triton import gate_of_both, gated
from kernels.gpu import tunables
from kernels.gpu.linear import quantise
from kernels.lm_head import reference as head
from kernels.lm_head.triton import head_and_argmax
from kernels.small_m_matmul.reference import linear
from kernels.small_m_matmul.triton import matmul
from kernels.weight_only_matmul import reference as small
from kernels.weight_only_matmul.triton import int4_linear, int8_linear, quantise_int4, quantise_int8
from tests.kernels.gpu.support import close, random

SHAPES = [(1, 64, 256), (3, 50, 100), (17, 33, 300), (64, 40, 64), (130, 70, 136)]  # rows, columns, depth
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype, seed=5, scale=depth**-0.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_matmul_equals_the_reference(shape: tuple[int, int, int]) -> None:
    x, weight = inputs(*shape, torch.float32)
    bias = random(shape[1], seed=9)
    close(matmul(x, weight), linear(x, weight))
    close(matmul(x, weight, bias), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_keeps_the_dtype_and_sums_in_float32(dtype: torch.dtype) -> None:
    x, weight = inputs(5, 40, 300, dtype)
    got = matmul(x, weight)
    assert got.dtype == dtype
    close(got, linear(x, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gated_product_equals_the_reference(shape: tuple[int, int, int]) -> None:
    x, gate = inputs(*shape, torch.float32)
    up = random(*gate.shape, seed=11)
    close(gated(x, gate, up), mlp.gated(x, gate, up), 1e-4)
    both = linear(x, torch.cat((gate, up)))
    close(gate_of_both(both), mlp.gate_of_both(both))
    close(mlp.gate_of_both(both), mlp.gated(x, gate, up), 1e-4)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_the_head_gives_float32_logits_and_their_largest(rows: int) -> None:
    x, weight = inputs(rows, 201, 100, torch.bfloat16)
    logits, greedy = head_and_argmax(x, weight)
    assert logits.dtype == torch.float32
    close(logits, head.head_and_argmax(x, weight)[0], 1e-4)
    assert torch.equal(greedy, head.greedy(logits))


def test_of_equal_logits_the_first_is_taken() -> None:
    for run in (head_and_argmax, head.head_and_argmax):
        assert run(torch.zeros(2, 64), torch.zeros(300, 64))[1].tolist() == [0, 0]
    assert head.greedy(torch.tensor([[1.0, 3.0, 3.0, 2.0]])).tolist() == [1]


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_int8_multiplies_what_its_weights_say(rows: int) -> None:
    x, weight = inputs(rows, 50, 136, torch.float32)
    level, scale = quantise_int8(weight)
    bias = random(50)
    said = small.int8_turned_back(level, scale)
    close(int8_linear(x, level, scale, bias), linear(x, said, bias))
    close(said, weight, 2e-2)


@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("group", [32, 128])
def test_int4_multiplies_what_its_weights_say(rows: int, group: int) -> None:
    x, weight = inputs(rows, 50, 256, torch.float32)
    packed, scale = quantise_int4(weight, group)
    close(int4_linear(x, packed, scale), linear(x, small.int4_turned_back(packed, scale)))


def test_int4_weights_are_near_what_they_stand_for() -> None:
    weight = random(20, 256)
    error = (small.int4_turned_back(*quantise_int4(weight)) - weight).abs()
    assert float(error.max()) <= float(weight.abs().max()) / 14 + 1e-6


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_fp8_multiplies_what_its_weights_say(rows: int) -> None:
    """From 64 rows the activations are fp8 as well."""
    x, weight = inputs(rows, 50, 136, torch.float32)
    level, scale = quantise_fp8(weight)
    said = fp8.turned_back(*quantise_rows(x)) if rows >= 64 else x
    bias = random(50)
    close(fp8_linear(x, level, scale, bias), fp8.fp8_linear(said, level, scale, bias), 1e-4)


def test_rows_become_fp8_with_a_scale_of_their_own() -> None:
    """The interpreter loses the carry when a value rounds up to a power of two, so a few of its values are half of torch's."""
    x = random(20, 136)
    level, scale = quantise_rows(x)
    want, want_scale = fp8.quantise(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(quantise_fp8(x)[0].float(), want.float())
    assert float((level.float() == want.float()).float().mean()) > 0.95


def test_a_kind_or_depth_that_is_not_supported_is_named() -> None:
    with pytest.raises(ValueError, match="one of same, fp8, int8, int4"):
        quantise(random(4, 64), "int3")
    with pytest.raises(ValueError, match="groups of 128, not 72"):
        quantise(random(4, 72), "int4")


def run_op(op: str, rows: int, params: dict[str, int]) -> tuple[Tensor, Tensor]:
    """(the operator's result, the reference's) at an odd shape."""
    x, weight = inputs(rows, 150, 256, torch.float32)
    if op == "gated_mlp":
        return gated(x, weight, weight, params), mlp.gated(x, weight, weight)
    if op == "lm_head":
        return head_and_argmax(x, weight, params)[0], linear(x, weight)
    if op == "weight_only_matmul":
        level, scale = quantise_int8(weight)
        return int8_linear(x, level, scale, None, params), linear(x, small.int8_turned_back(level, scale))
    if op == "fp8_matmul":
        level, scale = quantise_fp8(weight)
        quantised = rows >= tunables.resolve(op, params)["QUANTISE_FROM"]
        said = fp8.turned_back(*quantise_rows(x)) if quantised else x
        return fp8_linear(x, level, scale, None, params), fp8.fp8_linear(said, level, scale)
    return matmul(x, weight, None, params), linear(x, weight)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["small_m_matmul", "gated_mlp", "lm_head", "weight_only_matmul", "fp8_matmul"])
def test_every_parameter_value_is_right(op: str) -> None:
    tried = 0
    loaded = registry.load(op, "triton")
    for parameter in loaded.params:
        for value in parameter.values:
            values = {parameter.name: value}
            if loaded.allows(values):
                rows = 130 if parameter.name.startswith("LARGE") else 9
                close(*run_op(op, rows, values), 1e-4)
                tried += 1
    assert tried >= 20
