"""Device functions that several operators' kernels are written with, and how a product's tiles are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.dot import dot
from kernels.gpu.launch import power_of_two, precision

SMALL_M = 64  # rows up to which a product is bound by reading its weights


@triton.jit
def product(
    a, a_rows, weight, weight_rows, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [BLOCK_M, BLOCK_N]: rows `a_rows` of a [., depth] times rows `weight_rows` of weight [., depth].

    All rows named must exist: a caller names row 0 in place of one past the end and does not store it.
    """
    k = tl.arange(0, BLOCK_K)
    a_at = a + a_rows[:, None] * depth + k[None, :]
    weight_at = weight + weight_rows[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(a_at), tl.load(weight_at)
        else:
            left = k < depth - start
            x, w = tl.load(a_at, mask=left[None, :], other=0.0), tl.load(weight_at, mask=left[:, None], other=0.0)
        total = dot(x, w, total, PRECISION)
        a_at += BLOCK_K
        weight_at += BLOCK_K
    return total


@triton.jit
def tile_rows(tile, count, BLOCK: tl.constexpr):
    """(row numbers of a tile, int64 with row 0 in place of those past `count`; which are inside)."""
    rows = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    return tl.where(inside, rows, 0), inside


def matmul_tiles(op: str, x: Tensor, depth: int, params: Mapping[str, int] | None) -> dict[str, Any]:
    """BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, num_warps and num_stages for x [M, depth] from the operator's parameters.

    Up to SMALL_M rows the SMALL_ parameters count, above them the LARGE_ ones.
    """
    p, m = tunables.resolve(op, params), x.shape[0]
    size = "SMALL" if m <= SMALL_M else "LARGE"
    block_m = power_of_two(m, 16) if m <= SMALL_M else p["LARGE_BLOCK_M"]
    # rows of x take registers and shared memory too: as they grow, less depth is read at a time
    block_k = max(64, p["SMALL_BLOCK_K"] * 16 // block_m) if m <= SMALL_M else p["LARGE_BLOCK_K"]
    return {
        "BLOCK_M": block_m, "BLOCK_N": p[f"{size}_BLOCK_N"], "BLOCK_K": block_k, "EVEN_K": depth % block_k == 0,
        "PRECISION": precision(x), "num_warps": p[f"{size}_WARPS"], "num_stages": p[f"{size}_STAGES"],
    }  # fmt: skip


def grid(rows: int, columns: int, tiles: Mapping[str, Any]) -> tuple[int, int]:
    """Programs of a product. Those that read the same weights are neighbours, so that a weight is read once from memory."""
    return triton.cdiv(rows, tiles["BLOCK_M"]), triton.cdiv(columns, tiles["BLOCK_N"])
