"""Norms, rotation with the cache write, the mixture of experts and block copies under the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.gated_mlp.reference import gated
from kernels.kv_copy import reference as kv
from kernels.kv_copy.triton import copy_blocks, gather_blocks, scatter_blocks
from kernels.moe import reference as mixture
from kernels.moe.triton import experts_mlp, route
from kernels.qkv_rope_kv import reference as rope
from kernels.qkv_rope_kv.triton import rope_and_cache
from kernels.rmsnorm_residual import reference as norms
from kernels.rmsnorm_residual.triton import add_rmsnorm
from kernels.small_m_matmul.reference import linear
from tests.kernels.gpu.support import close, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100, 1000])
def test_the_norm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    x, residual = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=2)
    weight = random(width, dtype=dtype)
    summed, out = add_rmsnorm(x, weight, 1e-5, residual=residual)
    want_sum, _ = norms.add_rmsnorm(x, weight, 1e-5, residual=residual)
    close(summed, want_sum)
    close(out, norms.rms_norm(summed, weight, 1e-5))  # of the sum as stored: the interpreter cuts where a device rounds


def test_the_norm_of_chosen_rows() -> None:
    table, weight, rows = random(9, 96), random(96), torch.tensor([7, 0, 7])
    summed, out = add_rmsnorm(table, weight, 1e-5, rows=rows)
    assert torch.equal(summed, table[rows])
    close(out, norms.add_rmsnorm(table, weight, 1e-5, rows=rows)[1])
    _, out = add_rmsnorm(table, weight, 1e-5, residual=table, rows=rows, write_sum=False)
    close(out, norms.add_rmsnorm(table, weight, 1e-5, table, rows)[1])


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
def test_rotation_and_cache_write_equal_the_reference(dim: int, heads: tuple[int, int]) -> None:
    count, kv_count, block_size = *heads, 16
    qkv = random(3, (count + 2 * kv_count) * dim)
    angles = torch.outer(torch.arange(40.0), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    positions, slots = torch.tensor([5, 39, 0]), torch.tensor([33, -1, 0])
    found = []
    for run in (rope_and_cache, rope.rope_and_cache):
        keys, values = (torch.full((4, kv_count, block_size, dim), 9.0) for _ in range(2))
        q = run(qkv, angles.cos(), angles.sin(), positions, slots, keys, values, count)
        found.append((q, keys, values))
    for got, want in zip(*found, strict=True):
        close(got, want)
    plain = found[0][2]
    assert torch.equal(plain[2, :, 1], qkv[0].view(-1, dim)[count + kv_count :])
    assert int((plain != 9).any(-1).any(1).sum()) == 2  # the token at slot -1 is written nowhere


def test_a_rotation_by_a_right_angle_swaps_the_halves() -> None:
    x = random(1, 2, 8)
    got = rope.rotate(x, torch.zeros(1, 4), torch.ones(1, 4))
    assert torch.equal(got, torch.cat((-x[..., 4:], x[..., :4]), -1))


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_takes_the_largest(normalise: bool) -> None:
    logits = random(6, 11)
    routing = route(logits, 3, normalise)
    shares, ids = mixture.route(logits, 3, normalise)
    assert torch.equal(routing.ids.long(), ids)
    close(routing.shares, shares)
    assert torch.equal(routing.counts.long(), torch.bincount(ids.flatten(), minlength=11))


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_mixture_equals_the_reference(tokens: int) -> None:
    experts, hidden, ffn = 5, 72, 100
    x, logits = random(tokens, hidden), random(tokens, experts, scale=2.0)
    gate, up, down = (
        random(experts, *s, seed=i, scale=0.1) for i, s in enumerate([(ffn, hidden)] * 2 + [(hidden, ffn)])
    )
    want = mixture.experts_mlp(x, gate, up, down, *mixture.route(logits, 2))
    close(experts_mlp(x, gate, up, down, route(logits, 2)), want, 1e-4)


def test_experts_that_get_nothing_cost_nothing_and_break_nothing() -> None:
    logits = torch.full((20, 4), -9.0)
    logits[:, 2] = 9.0
    routing = route(logits, 1)
    assert routing.counts.tolist() == [0, 0, 20, 0]
    w = random(4, 64, 64, scale=0.1)
    x = random(20, 64)
    close(experts_mlp(x, w, w, w, routing), linear(gated(x, w[2], w[2]), w[2]), 1e-4)


def test_blocks_are_copied_gathered_and_scattered() -> None:
    pool = random(7, 2, 16, 80)
    want = pool.clone()
    copy_blocks(pool, pool, torch.tensor([0, 3]), torch.tensor([5, 6]))
    kv.copy_blocks(want, want, torch.tensor([0, 3]), torch.tensor([5, 6]))
    assert torch.equal(pool, want)
    buffer = gather_blocks(pool, torch.tensor([6, 1]))
    assert torch.equal(buffer, kv.gather_blocks(want, torch.tensor([6, 1])))
    scatter_blocks(buffer, pool, torch.tensor([2, 4]))
    kv.scatter_blocks(buffer, want, torch.tensor([2, 4]))
    assert torch.equal(pool, want) and torch.equal(pool[[2, 4]], want[[6, 1]])


def test_blocks_without_an_index_are_taken_in_order() -> None:
    source = random(3, 2, 16, 8)
    for run in (copy_blocks, kv.copy_blocks):
        target = torch.zeros(5, 2, 16, 8)
        run(source, target)
        assert torch.equal(target[:3], source) and not target[3:].any()
