"""Residual sum and RMS norm in plain torch, float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] -> float32 [..., width]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x and residual [N, width] -> (their sum in x's dtype, its norm in float32), both [R, width] of `rows` (all without it).

    The norm is of the sum as it is stored: that is what the next layer adds to.
    """
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    summed = summed if rows is None else summed[rows]
    return summed, rms_norm(summed, weight, eps)
