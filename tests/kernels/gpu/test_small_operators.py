"""Norms, rotation with the cache write, the mixture of experts and block copies under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.kv_copy.triton import copy_blocks, gather_blocks, scatter_blocks
from kernels.moe.triton import experts_mlp, route
from kernels.qkv_rope_kv.triton import rope_and_cache
from kernels.rmsnorm_residual.triton import add_rmsnorm
from tests.kernels.gpu.support import close, random


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100, 1000])
def test_the_norm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    x, residual = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=2)
    weight = random(width, dtype=dtype)
    summed, out = add_rmsnorm(x, weight, 1e-5, residual=residual)
    close(summed, x.float() + residual.float())
    close(out, norm(summed, weight))


def test_the_norm_of_chosen_rows() -> None:
    table, weight, rows = random(9, 96), random(96), torch.tensor([7, 0, 7])
    summed, out = add_rmsnorm(table, weight, 1e-5, rows=rows)
    assert torch.equal(summed, table[rows])
    close(out, norm(table[rows], weight))
    _, out = add_rmsnorm(table, weight, 1e-5, residual=table, rows=rows, write_sum=False)
    close(out, norm(2 * table[rows], weight))


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
def test_rotation_and_cache_write_equal_the_reference(dim: int, heads: tuple[int, int]) -> None:
    count, kv_count, block_size = *heads, 16
    qkv = random(3, (count + 2 * kv_count) * dim)
    angles = torch.outer(torch.arange(40.0), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    positions, slots = torch.tensor([5, 39, 0]), torch.tensor([33, -1, 0])
    keys, values = (torch.full((4, kv_count, block_size, dim), 9.0) for _ in range(2))
    got = rope_and_cache(qkv, angles.cos(), angles.sin(), positions, slots, keys, values, count)
    q, k, v = qkv.view(3, -1, dim).split((count, kv_count, kv_count), 1)
    cos, sin = (t[positions][:, None] for t in (angles.cos(), angles.sin()))
    close(got, rotated(q, cos, sin))
    want_keys, want_values = (torch.full_like(keys, 9.0) for _ in range(2))
    for token in (0, 2):  # the token at slot -1 is written nowhere
        block, at = divmod(int(slots[token]), block_size)
        want_keys[block, :, at], want_values[block, :, at] = rotated(k, cos, sin)[token], v[token]
    close(keys, want_keys)
    assert torch.equal(values, want_values)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_takes_the_largest(normalise: bool) -> None:
    logits = random(6, 11)
    routing = route(logits, 3, normalise)
    share, ids = logits.softmax(-1).topk(3)
    assert torch.equal(routing.ids.long(), ids)
    close(routing.shares, share / share.sum(-1, keepdim=True) if normalise else share)
    assert torch.equal(routing.counts.long(), torch.bincount(ids.flatten(), minlength=11))


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_mixture_equals_every_expert_by_hand(tokens: int) -> None:
    experts, hidden, ffn = 5, 72, 100
    x, logits = random(tokens, hidden), random(tokens, experts, scale=2.0)
    gate, up, down = (
        random(experts, *s, seed=i, scale=0.1) for i, s in enumerate([(ffn, hidden)] * 2 + [(hidden, ffn)])
    )
    routing = route(logits, 2)
    want = torch.zeros_like(x)
    for t in range(tokens):
        for e, share in zip(routing.ids[t].tolist(), routing.shares[t], strict=True):
            want[t] += share * (down[e] @ (F.silu(gate[e] @ x[t]) * (up[e] @ x[t])))
    close(experts_mlp(x, gate, up, down, routing), want, 1e-4)


def test_experts_that_get_nothing_cost_nothing_and_break_nothing() -> None:
    logits = torch.full((20, 4), -9.0)
    logits[:, 2] = 9.0
    routing = route(logits, 1)
    assert routing.counts.tolist() == [0, 0, 20, 0]
    w = random(4, 64, 64, scale=0.1)
    x = random(20, 64)
    close(experts_mlp(x, w, w, w, routing), F.linear(F.silu(F.linear(x, w[2])) * F.linear(x, w[2]), w[2]), 1e-4)


def test_blocks_are_copied_gathered_and_scattered() -> None:
    pool = random(7, 2, 16, 80)
    before = pool.clone()
    copy_blocks(pool, pool, torch.tensor([0, 3]), torch.tensor([5, 6]))
    assert torch.equal(pool[[5, 6]], before[[0, 3]]) and torch.equal(pool[:5], before[:5])
    buffer = gather_blocks(pool, torch.tensor([6, 1]))
    assert torch.equal(buffer, pool[[6, 1]])
    scatter_blocks(buffer, pool, torch.tensor([2, 4]))
    assert torch.equal(pool[[2, 4]], buffer) and torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])
