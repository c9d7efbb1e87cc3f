"""The step in plain torch, float32 throughout: what the kernel's logits and cache are tested against.

Same inputs as the kernel, one sequence and one layer at a time; slow and obvious.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.gated_mlp.reference import silu_mul
from kernels.lm_head.reference import head_and_argmax
from kernels.paged_attention.reference import attend, read_cache, write_cache
from kernels.qkv_rope_kv.reference import rotate
from kernels.rmsnorm_residual.reference import rms_norm
from kernels.small_m_matmul import reference as plain


def forward_step(
    config: Any, weights: Mapping[str, Tensor], batch: Any, cache: Sequence[Tensor], cos: Tensor, sin: Tensor
) -> Tensor:
    """Logits float32 [R, vocab]; `cache` (the kernel's layout, floats of any dtype or integers) is written at batch.slot."""

    def linear(x: Tensor, name: str) -> Tensor:
        return plain.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = weights["model.embed_tokens.weight"][batch.token_ids].float()
    c, s = cos[batch.positions], sin[batch.positions]
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}"
        y = rms_norm(x, weights[f"{p}.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (linear(y, f"{p}.self_attn.{n}_proj").unflatten(-1, (-1, config.head_dim)) for n in "qkv")
        layer = [tensor[:, i] for tensor in cache]
        write_cache(layer, batch.slot, rotate(k, c, s), v)
        y = torch.cat(attend_all(batch, rotate(q, c, s), layer, config.head_dim**-0.5))
        x = x + linear(y.flatten(1), f"{p}.self_attn.o_proj")
        y = rms_norm(x, weights[f"{p}.post_attention_layernorm.weight"], config.rms_norm_eps)
        y = silu_mul(linear(y, f"{p}.mlp.gate_proj"), linear(y, f"{p}.mlp.up_proj"))
        x = x + linear(y, f"{p}.mlp.down_proj")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return head_and_argmax(rms_norm(x[batch.logit_rows], weights["model.norm.weight"], config.rms_norm_eps), head)[0]


def attend_all(batch: Any, q: Tensor, cache: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Each sequence's attention output [its rows, heads, head_dim]."""
    starts = batch.query_start.tolist()
    lengths = batch.context_len.tolist()
    return [
        attend(q[a:b], *read_cache(cache, batch.block_table[i], n), scale)
        for i, (a, b, n) in enumerate(zip(starts, starts[1:], lengths, strict=False))
    ]
