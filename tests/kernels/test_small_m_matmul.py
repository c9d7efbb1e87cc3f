"""The small-batch linear layer: odd shapes, both result types, rows independent of their company."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.small_m_matmul import reference
from tests.kernels import support
from tests.kernels.contract import KernelContract


def case(rows: int, n: int, k: int, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(rows * 7919 + n * 31 + k)
    x, w = torch.randn(rows, k, generator=g).bfloat16(), (torch.randn(n, k, generator=g) * k**-0.5).bfloat16()
    return x, w, torch.randn(n, generator=g).bfloat16() if bias else None


class TestSmallMMatmul(KernelContract):
    op = "small_m_matmul"
    cases = {
        **{f"{rows} rows": case(rows, 96, 64) for rows in range(1, 18)},
        "narrow": case(3, 5, 2),
        "n is no multiple of 16": case(4, 131, 70, bias=True),
        "k is no multiple of 32": case(9, 64, 94),
        "many rows": case(65, 200, 130, bias=True),
        "wide": case(2, 1030, 1536),
    }
    mixed = "many rows"

    def run(self, library: ctypes.CDLL, case: Any, threads: int, block_size: int = 32) -> list[Tensor]:
        x, w, bias = case
        linear = support.glue(self.op).PackedLinear(library, w, bias, threads)
        return [linear(x, torch.float32), linear(x)]

    def expected(self, case: Any, values: Mapping[str, int] = {}) -> list[Tensor]:
        y = reference.linear(*case)
        return [y, y.bfloat16()]

    def close(self, got: Tensor, want: Tensor) -> None:
        exact = got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5 if exact else 1.6e-2, atol=2e-5 if exact else 1e-2)

    @pytest.mark.parametrize("build", [{"PM_LAYOUT": 0}, {"PM_LAYOUT": 1}, support.EMULATED], ids=str)
    def test_a_row_does_not_depend_on_its_company(self, build: Any) -> None:
        emulated = build == support.EMULATED
        library = support.library_for(self.op, build) if emulated else support.library(self.op, build)
        x, w, bias = self.cases["many rows"]
        linear = support.glue(self.op).PackedLinear(library, w, bias, 2)
        whole = linear(x, torch.float32)
        for rows in (1, 2, 7, 8, 9, 15, 16, 17, 33):
            assert torch.equal(linear(x[:rows], torch.float32), whole[:rows])

    def test_an_odd_input_width_and_other_dtypes_are_refused_by_name(self) -> None:
        linear = support.glue(self.op).PackedLinear
        with pytest.raises(ValueError, match="even input width"):
            linear(support.library(self.op), torch.zeros(4, 3, dtype=torch.bfloat16), None, 1)
        with pytest.raises(ValueError, match="bfloat16"):
            linear(support.library(self.op), torch.zeros(4, 4), None, 1)
        good = linear(support.library(self.op), torch.zeros(4, 4, dtype=torch.bfloat16), None, 1)
        with pytest.raises(ValueError, match="float16"):
            good(torch.zeros(1, 4, dtype=torch.float16))
