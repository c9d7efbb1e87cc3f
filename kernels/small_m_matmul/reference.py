"""The linear layer in plain torch, float32 sums."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, k], weight [n, k] -> float32 [M, n]."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
