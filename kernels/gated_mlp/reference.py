"""The gated product in plain torch, float32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from kernels.small_m_matmul.reference import linear


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [M, columns] -> float32 [M, columns]."""
    return F.silu(gate.float()) * up.float()


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """x [M, depth], gate and up [columns, depth] -> float32 [M, columns]."""
    return silu_mul(linear(x, gate), linear(x, up))


def gate_of_both(both: Tensor) -> Tensor:
    """both [M, 2 * columns], gates before ups -> float32 [M, columns]."""
    return silu_mul(*both.chunk(2, -1))
