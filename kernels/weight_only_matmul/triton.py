"""The linear layer with small weights: int8 with a scale for each output, int4 with a scale for each group of depth.

Only the weights are small: they are widened in registers and multiplied with x as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.dot import dot
from kernels.gpu.launch import launch
from kernels.gpu.tiles import grid, matmul_tiles, product, tile_rows

GROUP = 128  # columns that share a scale in int4


@triton.jit
def int8_matmul(
    x, weight, scale, bias, out, count, columns, depth, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, row_inside = tile_rows(tl.program_id(0), count, BLOCK_M)
    cols, col_inside = tile_rows(tl.program_id(1), columns, BLOCK_N)
    total = product(x, rows, weight, cols, depth, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION)
    total *= tl.load(scale + cols)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + cols).to(tl.float32)[None, :]
    at = out + rows[:, None] * columns + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def int4_matmul(
    x, packed, scale, bias, out, count, columns, depth, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    rows, row_inside = tile_rows(tl.program_id(0), count, BLOCK_M)
    cols, col_inside = tile_rows(tl.program_id(1), columns, BLOCK_N)
    k = tl.arange(0, HALF)
    x_at = x + rows[:, None] * depth + k[None, :]
    packed_at = packed + cols[None, :] * (depth // 2) + k[:, None]
    scale_at = scale + cols * (depth // GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, depth, GROUP):
        low_x, high_x, both = tl.load(x_at), tl.load(x_at + HALF), tl.load(packed_at)
        low, high = (both & 15).to(tl.int8) - 8, (both >> 4).to(tl.int8) - 8
        part = dot(low_x, low, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        part = dot(high_x, high, part, PRECISION)
        total += part * tl.load(scale_at)[None, :]
        x_at += GROUP
        packed_at += HALF
        scale_at += 1
    if HAS_BIAS:
        total += tl.load(bias + cols).to(tl.float32)[None, :]
    at = out + rows[:, None] * columns + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [columns, depth] -> (int8 [columns, depth], float32 scale [columns]) with weight ~ int8 * scale."""
    scale = weight.float().abs().amax(1).clamp_min(1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def quantise_int4(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """weight [columns, depth] -> (uint8 [columns, depth / 2], float32 scale [columns, depth / group]).

    A byte of a group holds column j (low half) and column j + group / 2 (high half), both 8 above their value, so that a kernel
    reads two unbroken runs of x. Raises ValueError when the depth does not divide into groups.
    """
    columns, depth = weight.shape
    if depth % group:
        raise ValueError(f"int4 weights need a depth that divides into groups of {group}, not {depth}")
    groups = weight.float().view(columns, depth // group, group)
    scale = groups.abs().amax(-1).clamp_min(1e-12) / 7
    level = ((groups / scale[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    low, high = level.chunk(2, -1)
    return (low | (high << 4)).reshape(columns, depth // 2), scale


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, params: Mapping[str, int] | None = None
) -> Tensor:
    """x [M, depth], int8 weight and scale of `quantise_int8` -> [M, columns] in x's dtype."""
    (count, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((count, columns), dtype=x.dtype, device=x.device)
    tiles = matmul_tiles("weight_only_matmul", x, depth, params)
    launch(
        int8_matmul, grid(count, columns, tiles), x, weight, scale, bias, out, count, columns, depth,
        HAS_BIAS=bias is not None, **tiles,
    )  # fmt: skip
    return out


def int4_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None, params: Mapping[str, int] | None = None
) -> Tensor:
    """x [M, depth], packed weight and scale of `quantise_int4` -> [M, columns] in x's dtype. A group is read at a time."""
    (count, depth), columns = x.shape, packed.shape[0]
    out = torch.empty((count, columns), dtype=x.dtype, device=x.device)
    tiles = matmul_tiles("weight_only_matmul", x, depth, params)
    del tiles["BLOCK_K"], tiles["EVEN_K"]
    launch(
        int4_matmul, grid(count, columns, tiles), x, packed, scale, bias, out, count, columns, depth,
        HAS_BIAS=bias is not None, GROUP=depth // scale.shape[1], **tiles,
    )  # fmt: skip
    return out
