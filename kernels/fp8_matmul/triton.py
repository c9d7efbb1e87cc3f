"""The linear layer with fp8 (e4m3) weights and a scale for each output: compute capability 9.0 and up.

With few rows only the weights are fp8 and x stays as it is; with many, each row of x is scaled to fp8 as well and the tensor cores
multiply fp8 by fp8.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.launch import launch, power_of_two
from kernels.gpu.tiles import grid, matmul_tiles, product, tile_rows

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest finite e4m3


@triton.jit
def fp8_matmul(
    x, x_scale, weight, scale, bias, out, count, columns, depth, HAS_X_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, row_inside = tile_rows(tl.program_id(0), count, BLOCK_M)
    cols, col_inside = tile_rows(tl.program_id(1), columns, BLOCK_N)
    total = product(x, rows, weight, cols, depth, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION)
    total *= tl.load(scale + cols)[None, :]
    if HAS_X_SCALE:
        total *= tl.load(x_scale + rows)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + cols).to(tl.float32)[None, :]
    at = out + rows[:, None] * columns + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def fp8_rows(x, out, scale, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(value)), 1e-12) / LARGEST
    tl.store(scale + row, unit)
    tl.store(out + row * width + at, (value / unit).to(out.dtype.element_ty), mask=at < width)


def quantise_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [columns, depth] -> (e4m3 [columns, depth], float32 scale [columns]) with weight ~ e4m3 * scale."""
    scale = weight.float().abs().amax(1).clamp_min(1e-12) / LARGEST
    return (weight.float() / scale[:, None]).to(FP8), scale


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, depth] -> (e4m3 [M, depth], float32 scale [M]), on the device."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty((x.shape[0],), dtype=torch.float32, device=x.device)
    launch(fp8_rows, (x.shape[0],), x, out, scale, x.shape[1], LARGEST=LARGEST, BLOCK=power_of_two(x.shape[1]))
    return out, scale


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, params: Mapping[str, int] | None = None
) -> Tensor:
    """x [M, depth], e4m3 weight and scale of `quantise_fp8` -> [M, columns] in x's dtype."""
    (count, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((count, columns), dtype=x.dtype, device=x.device)
    tiles = matmul_tiles("fp8_matmul", x, depth, params)
    x_scale = None
    if count >= tunables.resolve("fp8_matmul", params)["QUANTISE_FROM"]:
        x, x_scale = quantise_rows(x)
    launch(
        fp8_matmul, grid(count, columns, tiles), x, x_scale, weight, scale, bias, out, count, columns, depth,
        HAS_X_SCALE=x_scale is not None, HAS_BIAS=bias is not None, **tiles,
    )  # fmt: skip
    return out
