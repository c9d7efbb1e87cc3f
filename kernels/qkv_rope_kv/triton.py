"""After the q, k, v product: rotates queries and keys, writes keys and values into the paged cache. One read, one write of each.

A token whose slot is negative (padding of a captured graph) writes nothing into the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tunables
from kernels.gpu.launch import launch, power_of_two


@triton.jit
def qkv_rope_kv(
    qkv, cos, sin, positions, slots, q_out, keys, values, heads, kv_heads, block_size,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_BLOCK)
    is_q, is_k = head < heads, (head >= heads) & (head < heads + kv_heads)
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    exists = (is_q | is_k | is_v)[:, None] & (d < HALF)[None, :]
    at = qkv + token * (heads + 2 * kv_heads) * DIM + head[:, None] * DIM + d[None, :]
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=exists, other=0.0).to(tl.float32)
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
    c, s = tl.where(is_v[:, None], 1.0, c), tl.where(is_v[:, None], 0.0, s)
    turned_first = (first * c - second * s).to(q_out.dtype.element_ty)
    turned_second = (second * c + first * s).to(q_out.dtype.element_ty)
    q_at = q_out + (token * heads + head[:, None]) * DIM + d[None, :]
    tl.store(q_at, turned_first, mask=exists & is_q[:, None])
    tl.store(q_at + HALF, turned_second, mask=exists & is_q[:, None])
    slot = tl.load(slots + token)
    if slot >= 0:
        row = (slot // block_size) * kv_heads * block_size + slot % block_size  # of KV head 0
        k_at = keys + (row + (head - heads)[:, None] * block_size) * DIM + d[None, :]
        tl.store(k_at, turned_first, mask=exists & is_k[:, None])
        tl.store(k_at + HALF, turned_second, mask=exists & is_k[:, None])
        v_at = values + (row + (head - heads - kv_heads)[:, None] * block_size) * DIM + d[None, :]
        tl.store(v_at, turned_first, mask=exists & is_v[:, None])
        tl.store(v_at + HALF, turned_second, mask=exists & is_v[:, None])


def rope_and_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int,
    params: Mapping[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Rotated queries [T, heads, dim]; rotated keys and plain values are written at `slots`.

    qkv [T, (heads + 2 kv_heads) * dim], rows of q, k, v one after another; cos, sin float32 [positions, dim / 2]; positions
    and slots int64 [T]; keys, values [blocks, kv_heads, block_size, dim].
    """
    _, kv_heads, block_size, dim = keys.shape
    q = torch.empty((qkv.shape[0], heads, dim), dtype=qkv.dtype, device=qkv.device)
    p = tunables.resolve("qkv_rope_kv", params)
    launch(
        qkv_rope_kv, (qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, p["HEADS"])),
        qkv, cos, sin, positions, slots, q, keys, values, heads, kv_heads, block_size,
        DIM=dim, HALF_BLOCK=power_of_two(dim // 2), HEADS=p["HEADS"], num_warps=p["WARPS"],
    )  # fmt: skip
    return q
