"""The linear layer with e4m3 weights in plain torch: turn back, multiply in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.small_m_matmul.reference import linear


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, depth] -> (e4m3 [rows, depth], float32 scale [rows]); a row's largest value becomes the largest finite e4m3."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = x.float().abs().amax(1).clamp_min(1e-12) / largest
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def turned_back(level: Tensor, scale: Tensor) -> Tensor:
    """e4m3 level [rows, depth], scale [rows] -> float32 [rows, depth]."""
    return level.float() * scale[:, None]


def fp8_linear(x: Tensor, level: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, depth], e4m3 level [columns, depth], scale [columns] -> float32 [M, columns]."""
    return linear(x, turned_back(level, scale), bias)
