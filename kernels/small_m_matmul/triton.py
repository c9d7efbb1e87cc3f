"""The linear layer. A few rows (decode) and many (prefill) have tiles of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch
from kernels.gpu.tiles import grid, matmul_tiles, product, tile_rows


@triton.jit
def small_m_matmul(
    x, weight, bias, out, count, columns, depth, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, row_inside = tile_rows(tl.program_id(0), count, BLOCK_M)
    cols, col_inside = tile_rows(tl.program_id(1), columns, BLOCK_N)
    total = product(x, rows, weight, cols, depth, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + cols).to(tl.float32)[None, :]
    at = out + rows[:, None] * columns + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, params: Mapping[str, int] | None = None) -> Tensor:
    """x [M, depth], weight [columns, depth], bias [columns] -> [M, columns] in x's dtype, summed in float32."""
    (count, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((count, columns), dtype=x.dtype, device=x.device)
    tiles = matmul_tiles("small_m_matmul", x, depth, params)
    launch(
        small_m_matmul, grid(count, columns, tiles), x, weight, bias, out, count, columns, depth,
        HAS_BIAS=bias is not None, **tiles,
    )  # fmt: skip
    return out
