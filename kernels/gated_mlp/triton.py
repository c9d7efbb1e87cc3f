"""silu(x gate) * (x up), both products in one pass over x; and the same of a product that was made apart (quantised weights)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.dot import dot
from kernels.gpu.launch import launch
from kernels.gpu.tiles import grid, matmul_tiles, tile_rows


@triton.jit
def gated_mlp(
    x, gate, up, out, count, columns, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, row_inside = tile_rows(tl.program_id(0), count, BLOCK_M)
    cols, col_inside = tile_rows(tl.program_id(1), columns, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + rows[:, None] * depth + k[None, :]
    weight_at = cols[None, :] * depth + k[:, None]
    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = (k < depth - start) | EVEN_K
        a = tl.load(x_at, mask=left[None, :], other=0.0)
        g = dot(a, tl.load(gate + weight_at, mask=left[:, None], other=0.0), g, PRECISION)
        u = dot(a, tl.load(up + weight_at, mask=left[:, None], other=0.0), u, PRECISION)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    h = g * tl.sigmoid(g) * u
    at = out + rows[:, None] * columns + cols[None, :]
    tl.store(at, h.to(out.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def silu_mul(both, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    g = tl.load(both + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


def gated(x: Tensor, gate: Tensor, up: Tensor, params: Mapping[str, int] | None = None) -> Tensor:
    """x [M, depth], gate and up [columns, depth] -> silu(x gate') * (x up') [M, columns] in x's dtype, rounded once."""
    (count, depth), columns = x.shape, gate.shape[0]
    out = torch.empty((count, columns), dtype=x.dtype, device=x.device)
    tiles = matmul_tiles("gated_mlp", x, depth, params)
    launch(gated_mlp, grid(count, columns, tiles), x, gate, up, out, count, columns, depth, **tiles)
    return out


def gate_of_both(both: Tensor) -> Tensor:
    """both [M, 2 * columns], gates before ups -> silu(gate) * up [M, columns]."""
    count, columns = both.shape[0], both.shape[1] // 2
    out = torch.empty((count, columns), dtype=both.dtype, device=both.device)
    launch(silu_mul, (count, triton.cdiv(columns, 1024)), both, out, columns, BLOCK=1024)
    return out
