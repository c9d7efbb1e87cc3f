"""The head: float32 logits and, on the way, each row's largest one, so that a greedy step never reads its logits again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch, power_of_two
from kernels.gpu.tiles import grid, matmul_tiles, product, tile_rows


@triton.jit
def lm_head(
    x, weight, logits, tile_best, tile_index, count, vocab, depth, tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, row_inside = tile_rows(tl.program_id(0), count, BLOCK_M)
    cols, col_inside = tile_rows(tl.program_id(1), vocab, BLOCK_N)
    total = product(x, rows, weight, cols, depth, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION)
    tl.store(logits + rows[:, None] * vocab + cols[None, :], total, mask=row_inside[:, None] & col_inside[None, :])
    total = tl.where(col_inside[None, :], total, float("-inf"))
    at = rows * tiles + tl.program_id(1)
    tl.store(tile_best + at, tl.max(total, 1), mask=row_inside)
    tl.store(tile_index + at, tl.argmax(total, 1) + tl.program_id(1) * BLOCK_N, mask=row_inside)


@triton.jit
def argmax_tiles(tile_best, tile_index, out, tiles, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best = tl.load(tile_best + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    tl.store(out + row, tl.load(tile_index + row * tiles + tl.argmax(best, 0)).to(tl.int64))


def head_and_argmax(x: Tensor, weight: Tensor, params: Mapping[str, int] | None = None) -> tuple[Tensor, Tensor]:
    """x [R, depth], weight [vocab, depth] -> float32 logits [R, vocab], int64 [R] the first of each row's largest."""
    (count, depth), vocab = x.shape, weight.shape[0]
    chosen = matmul_tiles("lm_head", x, depth, params)
    tiles = triton.cdiv(vocab, chosen["BLOCK_N"])
    logits = torch.empty((count, vocab), dtype=torch.float32, device=x.device)
    tile_best = torch.empty((count, tiles), dtype=torch.float32, device=x.device)
    tile_index = torch.empty((count, tiles), dtype=torch.int32, device=x.device)
    greedy = torch.empty((count,), dtype=torch.int64, device=x.device)
    launch(
        lm_head,
        grid(count, vocab, chosen),
        x,
        weight,
        logits,
        tile_best,
        tile_index,
        count,
        vocab,
        depth,
        tiles,
        **chosen,
    )
    launch(argmax_tiles, (count,), tile_best, tile_index, greedy, tiles, BLOCK=power_of_two(tiles))
    return logits, greedy
