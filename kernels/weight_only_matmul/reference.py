"""The linear layer with quantised weights in plain torch: quantise, turn back, multiply in float32.

The C++ kernel quantises weights and inputs. Each group along k has its scale, in bf16. 8 bits: symmetric, the scale rounded so
that the largest value is not cut off. 4 bits: from the smallest value to the largest, the smallest in bf16 too. Inputs: symmetric
8 bits for each group. All round to nearest even, as the kernel does. The Triton kernel takes weights that are integers already
and inputs as they are: `*_turned_back` say what its weights stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped(x: Tensor, group: int) -> Tensor:
    """x [rows, k] -> float32 [rows, groups, group], the last group filled up with zeros."""
    return F.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def turned_back(x: Tensor, group: int) -> Tensor:
    """What is left of the inputs x [rows, k] after 8 bits: float32 [rows, k]."""
    g = grouped(x, group)
    most = g.abs().amax(-1, keepdim=True)
    # a tensor over a tensor: torch divides a number by a tensor as a product with its reciprocal, which rounds otherwise
    steps = (g * torch.where(most > 0, torch.full_like(most, 127.0) / most, 0.0)).round()
    return (steps * (most / 127.0)).flatten(1)[:, : x.shape[1]]


def weights_turned_back(w: Tensor, bits: int, group: int) -> Tensor:
    """What is left of the weights w [n, k] after `bits` bits: float32 [n, k]."""
    k = w.shape[1]
    filled = F.pad(w.float(), (0, -k % group), value=float("nan")).unflatten(-1, (-1, group))
    low, high = (
        filled.nan_to_num(float("inf")).amin(-1, keepdim=True),
        filled.nan_to_num(float("-inf")).amax(-1, keepdim=True),
    )
    if bits == 8:
        largest = torch.maximum(high, -low)
        scale = (largest / 127.0).bfloat16()
        cut = scale.float() * 127.0 < largest
        scale = torch.where(cut, (scale.view(torch.int16) + 1).view(torch.bfloat16), scale).float()
        low = -128.0 * scale  # unsigned, as they are kept
    else:
        scale, low = ((high - low) / 15.0).bfloat16().float(), low.bfloat16().float()
    steps = torch.where(scale > 0, ((filled - low) / scale).round().clamp(0, 2**bits - 1), 0.0)
    return (steps * scale + low).flatten(1)[:, :k]


def quantised_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, bits: int = 8, group: int = 32) -> Tensor:
    """x [M, k], weight [n, k] -> float32 [M, n]."""
    y = turned_back(x, group) @ weights_turned_back(weight, bits, group).T
    return y if bias is None else y + bias.float()


def int8_turned_back(level: Tensor, scale: Tensor) -> Tensor:
    """int8 level [n, k], float32 scale [n] -> float32 [n, k]."""
    return level.float() * scale[:, None]


def int4_turned_back(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 packed [n, k / 2], float32 scale [n, groups] -> float32 [n, k].

    A byte of a group holds column j (low half) and column j + group / 2 (high half), both 8 above their value.
    """
    both = packed.unflatten(-1, (scale.shape[1], -1))
    level = torch.cat((both & 15, both >> 4), -1).float() - 8
    return (level * scale[..., None]).flatten(1)
