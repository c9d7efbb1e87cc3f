"""Integer weights: equal to the same rounding done in torch, rows independent of their company."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.weight_only_matmul import reference
from tests.kernels import support
from tests.kernels.contract import KernelContract
from tests.kernels.test_small_m_matmul import case


class TestWeightOnlyMatmul(KernelContract):
    op = "weight_only_matmul"
    cases = {
        **{f"{rows} rows": case(rows, 96, 64) for rows in range(1, 17, 3)},
        "narrow": case(3, 5, 2),
        "odd width": case(2, 33, 77),
        "n is no multiple of 16": case(4, 131, 70, bias=True),
        "many rows": case(65, 200, 130, bias=True),
        "wide": case(2, 1030, 1536),
    }
    mixed = "many rows"

    def run(self, library: ctypes.CDLL, case: Any, threads: int, block_size: int = 32) -> list[Tensor]:
        x, w, bias = case
        linear = support.glue(self.op).QuantisedLinear(library, w, bias, threads)
        return [linear(x, torch.float32), linear(x)]

    def expected(self, case: Any, values: Mapping[str, int] = {}) -> list[Tensor]:
        bits, group = values.get("PM_WEIGHT_BITS", 8), values.get("PM_GROUP", 32)
        y = reference.quantised_linear(*case, bits, group)
        return [y, y.bfloat16()]

    def close(self, got: Tensor, want: Tensor) -> None:
        exact = got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5 if exact else 1.6e-2, atol=2e-5 if exact else 1e-2)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_a_row_does_not_depend_on_its_company(self, bits: int) -> None:
        library = support.library(self.op, {"PM_WEIGHT_BITS": bits})
        x, w, bias = self.cases["many rows"]
        linear = support.glue(self.op).QuantisedLinear(library, w, bias, 2)
        whole = linear(x, torch.float32)
        for rows in (1, 2, 7, 8, 9, 33):
            assert torch.equal(linear(x[:rows], torch.float32), whole[:rows])

    def test_eight_bits_are_nearer_to_the_truth_than_four(self) -> None:
        x, w, bias = self.cases["wide"]
        truth = x.float() @ w.float().T
        errors = []
        for bits in (8, 4):
            linear = support.glue(self.op).QuantisedLinear(
                support.library(self.op, {"PM_WEIGHT_BITS": bits}), w, bias, 1
            )
            errors.append(float((linear(x, torch.float32) - truth).pow(2).mean().sqrt() / truth.std()))
        assert errors[0] < 0.02 and 4 * errors[0] < errors[1] < 0.2

    def test_rows_of_zeros_stay_zero_and_equal_weights_near(self) -> None:
        x, w = torch.zeros(2, 64, dtype=torch.bfloat16), torch.full((16, 64), 0.5, dtype=torch.bfloat16)
        x[1] = 1.0
        for bits in (8, 4):
            linear = support.glue(self.op).QuantisedLinear(
                support.library(self.op, {"PM_WEIGHT_BITS": bits}), w, None, 1
            )
            got = linear(x, torch.float32)
            assert torch.equal(got[0], torch.zeros(16))
            torch.testing.assert_close(got[1], torch.full((16,), 32.0), rtol=1 / 254, atol=0)  # half a step
