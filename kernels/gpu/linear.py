"""A linear layer whose weight is kept as it is, or as fp8, int8 or int4: which kernel a product goes to is decided here alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.fp8_matmul.triton import fp8_linear, quantise_fp8
from kernels.gpu.tunables import INT4_GROUPS, KINDS
from kernels.small_m_matmul.triton import matmul
from kernels.weight_only_matmul.triton import int4_linear, int8_linear, quantise_int4, quantise_int8

Params = Mapping[str, Mapping[str, int]]  # parameter values by operator


@dataclass(frozen=True, slots=True)
class Linear:
    """x [M, depth] -> [M, columns] in x's dtype."""

    kind: str
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    params: Mapping[str, int] | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return matmul(x, self.weight, self.bias, self.params)
        run = {"fp8": fp8_linear, "int8": int8_linear, "int4": int4_linear}[self.kind]
        return run(x, self.weight, self.scale, self.bias, self.params)


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """(weight, scale) of a weight [columns, depth] in one of KINDS. Raises ValueError for a kind or depth that is not supported."""
    if kind == "same":
        return weight, None
    if kind == "int4":
        depth = weight.shape[1]
        return quantise_int4(weight, next((g for g in INT4_GROUPS if depth % g == 0), INT4_GROUPS[0]))
    if kind not in KINDS:
        raise ValueError(f"weights cannot be {kind!r}: they are one of {', '.join(KINDS)}")
    return quantise_fp8(weight) if kind == "fp8" else quantise_int8(weight)
