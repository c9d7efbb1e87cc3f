"""Residual sum and RMS norm in one pass over a row, optionally of gathered rows (an embedding, the rows whose logits are asked for)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.launch import launch, power_of_two


@triton.jit
def rmsnorm_residual(
    x, residual, rows, weight, summed, out, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, WRITE_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = tl.load(rows + row).to(tl.int64) if HAS_ROWS else row.to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    h = tl.load(x + source * width + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # the sum is rounded as it is stored, so that the norm sees what the next layer will add to
        h = (h.to(tl.float32) + tl.load(residual + source * width + at, mask=inside, other=0.0).to(tl.float32)).to(
            h.dtype
        )
    if WRITE_SUM:
        tl.store(summed + row.to(tl.int64) * width + at, h, mask=inside)
    h32 = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h32 * h32) / width + eps)
    normed = (h32 * scale).to(h.dtype).to(tl.float32) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + at, normed.to(out.dtype.element_ty), mask=inside)


def add_rmsnorm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, rows: Tensor | None = None,
    write_sum: bool = True, params: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x + residual, its RMS norm times `weight`), both [R, width] in x's dtype.

    x and residual [N, width], contiguous; `rows` int64 [R] picks rows of both (R = N without it). With `write_sum` False the
    first tensor is x itself.
    """
    width, count = x.shape[1], x.shape[0] if rows is None else rows.shape[0]
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    summed = torch.empty_like(out) if write_sum else x
    launch(
        rmsnorm_residual, (count,), x, residual, rows, weight, summed, out, width, eps,
        HAS_RESIDUAL=residual is not None, HAS_ROWS=rows is not None, WRITE_SUM=write_sum, BLOCK=power_of_two(width),
        num_warps=tunables.resolve("rmsnorm_residual", params)["WARPS"],
    )  # fmt: skip
    return summed, out
