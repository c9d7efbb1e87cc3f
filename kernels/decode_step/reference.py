"""The step in plain torch, float32 throughout: what the kernel's logits and cache are tested against.

Same inputs as the kernel, one sequence and one layer at a time; slow and obvious.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.paged_attention.reference import attend, read_cache, write_cache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]; cos, sin [T, head_dim / 2]. Pairs (d, d + head_dim / 2)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def forward_step(
    config: Any, weights: Mapping[str, Tensor], batch: Any, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Logits float32 [R, vocab]; keys and values (the kernel's layout, any float dtype) are written at batch.slot."""

    def linear(x: Tensor, name: str) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return F.linear(x, weights[f"{name}.weight"].float(), None if bias is None else bias.float())

    x = weights["model.embed_tokens.weight"][batch.token_ids].float()
    c, s = cos[batch.positions], sin[batch.positions]
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}"
        y = rms_norm(x, weights[f"{p}.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (linear(y, f"{p}.self_attn.{n}_proj").unflatten(-1, (-1, config.head_dim)) for n in "qkv")
        write_cache(keys[:, i], values[:, i], batch.slot, rotate(k, c, s), v)
        y = torch.cat(attend_all(batch, rotate(q, c, s), keys[:, i], values[:, i], config.head_dim**-0.5))
        x = x + linear(y.flatten(1), f"{p}.self_attn.o_proj")
        y = rms_norm(x, weights[f"{p}.post_attention_layernorm.weight"], config.rms_norm_eps)
        y = F.silu(linear(y, f"{p}.mlp.gate_proj")) * linear(y, f"{p}.mlp.up_proj")
        x = x + linear(y, f"{p}.mlp.down_proj")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return F.linear(rms_norm(x[batch.logit_rows], weights["model.norm.weight"], config.rms_norm_eps), head.float())


def attend_all(batch: Any, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> list[Tensor]:
    """Each sequence's attention output [its rows, heads, head_dim]."""
    starts = batch.query_start.tolist()
    lengths = batch.context_len.tolist()
    return [
        attend(q[a:b], *read_cache(keys, values, batch.block_table[i], n), scale)
        for i, (a, b, n) in enumerate(zip(starts, starts[1:], lengths, strict=False))
    ]
