"""A mixture of experts: routing (softmax, the largest k of a row), then matrix products grouped by expert.

Assignments (token, expert) are sorted by expert; a program finds its expert from the counts, so nothing is padded, no count is
read back to the host and a captured graph stays right whatever the routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.dot import dot
from kernels.gpu.launch import launch, power_of_two, precision


@triton.jit
def moe_route(logits, ids, shares, experts, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, NORMALISE: tl.constexpr):
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E)
    score = tl.load(logits + row * experts + e, mask=e < experts, other=float("-inf")).to(tl.float32)
    weight = tl.exp(score - tl.max(score))
    whole = tl.sum(weight)
    rest = tl.where(e < experts, weight, -1.0)
    if NORMALISE:  # the shares of the chosen experts sum to one
        whole = 0.0
        left = rest
        for _ in tl.static_range(TOP_K):
            whole += tl.max(left)
            left = tl.where(e == tl.argmax(left, 0), -1.0, left)
    for i in tl.static_range(TOP_K):
        chosen = tl.argmax(rest, 0)
        tl.store(ids + row * TOP_K + i, chosen)
        tl.store(shares + row * TOP_K + i, tl.max(rest) / whole)
        rest = tl.where(e == chosen, -1.0, rest)


@triton.jit
def moe_matmul(
    x, gate, up, shares, order, counts, out, experts, columns, depth,
    TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    count = tl.load(counts + e, mask=e < experts, other=0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, 0) - tiles
    if tile >= tl.sum(tiles):
        return
    expert = tl.sum((before + tiles <= tile).to(tl.int32))
    mine = e == expert
    first = tl.sum(tl.where(mine, tl.cumsum(count, 0) - count, 0))
    within = (tile - tl.sum(tl.where(mine, before, 0))) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = within < tl.sum(tl.where(mine, count, 0))
    assignment = tl.load(order + tl.where(inside, first + within, 0)).to(tl.int64)
    row = assignment // TOP_K if GATED else assignment
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * depth + k[None, :]
    weight_at = (expert.to(tl.int64) * columns + tl.where(col < columns, col, 0))[None, :] * depth + k[:, None]
    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = k < depth - start
        a = tl.load(x_at, mask=left[None, :], other=0.0)
        g = dot(a, tl.load(gate + weight_at, mask=left[:, None], other=0.0), g, PRECISION)
        if GATED:
            u = dot(a, tl.load(up + weight_at, mask=left[:, None], other=0.0), u, PRECISION)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    result = g * tl.sigmoid(g) * u if GATED else g * tl.load(shares + assignment)[:, None]
    at = out + assignment[:, None] * columns + col[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None] & (col < columns)[None, :])


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each of T tokens goes to. Assignment a is expert a % k of token a // k."""

    ids: Tensor  # int32 [T, k]
    shares: Tensor  # float32 [T, k]
    order: Tensor  # int64 [T * k], assignments sorted by expert
    counts: Tensor  # int32 [experts], assignments of each expert


def route(logits: Tensor, top_k: int, normalise: bool = True) -> Routing:
    """Softmax of logits [T, experts] and its `top_k` largest; with `normalise` their shares sum to one."""
    tokens, experts = logits.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    launch(
        moe_route, (tokens,), logits, ids, shares, experts, TOP_K=top_k, BLOCK_E=power_of_two(experts),
        NORMALISE=normalise, num_warps=1,
    )  # fmt: skip
    by_expert = torch.arange(experts, device=ids.device, dtype=torch.int32)[:, None] == ids.view(1, -1)
    return Routing(ids, shares, ids.view(-1).sort(stable=True).indices, by_expert.sum(1, dtype=torch.int32))


def experts_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, routing: Routing, params: Mapping[str, int] | None = None
) -> Tensor:
    """x [T, hidden], gate and up [experts, ffn, hidden], down [experts, hidden, ffn] -> [T, hidden] in x's dtype."""
    top_k = routing.ids.shape[1]
    h = torch.empty((x.shape[0] * top_k, gate.shape[1]), dtype=x.dtype, device=x.device)
    grouped(x, gate, up, routing, h, True, params)
    parts = torch.empty((x.shape[0] * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    grouped(h, down, down, routing, parts, False, params)
    return parts.view(x.shape[0], top_k, -1).sum(1).to(x.dtype)


def grouped(
    x: Tensor, gate: Tensor, up: Tensor, routing: Routing, out: Tensor, gated: bool, params: Mapping[str, int] | None
) -> None:
    """One product for each assignment into out [T * k, columns]: gated of a token's row, or plain of an assignment's own row
    times its share."""
    p, (experts, columns, depth) = tunables.resolve("moe", params), gate.shape
    assignments, top_k = out.shape[0], routing.ids.shape[1]
    most_tiles = min(assignments, triton.cdiv(assignments, p["BLOCK_M"]) + experts)
    launch(
        moe_matmul, (most_tiles, triton.cdiv(columns, p["BLOCK_N"])),
        x, gate, up, routing.shares, routing.order, routing.counts, out, experts, columns, depth,
        TOP_K=top_k, GATED=gated, BLOCK_E=power_of_two(experts), BLOCK_M=p["BLOCK_M"], BLOCK_N=p["BLOCK_N"],
        BLOCK_K=p["BLOCK_K"], PRECISION=precision(x), num_warps=p["WARPS"], num_stages=p["STAGES"],
    )  # fmt: skip
