"""One step of a Llama-like model made of the Triton operators: prefill, decode, chunks and mixtures of them in one call.

It knows nothing of engines, requests or files: `llama.py` gives it weights, its caller the inputs and the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.gpu.linear import Linear, Params
from kernels.lm_head.triton import head_and_argmax
from kernels.paged_decode_attention.triton import decode_attention
from kernels.prefill_attention.triton import chunk_attention
from kernels.qkv_rope_kv.triton import rope_and_cache
from kernels.rmsnorm_residual.triton import add_rmsnorm


@dataclass(frozen=True, slots=True)
class StepInput:
    """S sequences, T query tokens, on the device. Sequences named in neither `decode` nor `prefill` get no attention."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where keys and values go; negative: nowhere
    query_start: Tensor  # int32 [S + 1]
    contexts: Tensor  # int32 [S], tokens in the cache after the step
    table: Tensor  # int32 [S, B]
    decode: Tensor  # int32 [D], sequences with one query token
    prefill: Tensor  # int32 [P], sequences with more
    longest: int  # query tokens of the longest in `prefill`
    logit_rows: Tensor  # int64 [R]


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear  # rows of q, k and v one after another
    out: Linear
    mlp_norm: Tensor
    mlp: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Layer]
    norm: Tensor
    head: Tensor  # [vocab, hidden]
    cos: Tensor  # float32 [positions, head_dim / 2]
    sin: Tensor
    heads: int
    eps: float
    params: Params = field(default_factory=dict)


def run_step(model: Model, step: StepInput, cache: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(float32 logits [R, vocab], int64 [R] each row's largest). Writes keys and values at `step.slots`.

    `cache` holds keys and values of each layer in turn, each [blocks, kv_heads, block_size, head_dim].
    """
    norm = model.params.get("rmsnorm_residual")
    x = residual = None
    for i, layer in enumerate(model.layers):
        if x is None:
            residual, h = add_rmsnorm(
                model.embedding, layer.attention_norm, model.eps, rows=step.token_ids, params=norm
            )
        else:
            residual, h = add_rmsnorm(x, layer.attention_norm, model.eps, residual=residual, params=norm)
        x = layer.out(attention(model, step, layer.qkv(h), cache[2 * i], cache[2 * i + 1]))
        residual, h = add_rmsnorm(x, layer.mlp_norm, model.eps, residual=residual, params=norm)
        x = layer.mlp(h)
    _, h = add_rmsnorm(x, model.norm, model.eps, residual=residual, rows=step.logit_rows, write_sum=False, params=norm)
    return head_and_argmax(h, model.head, model.params.get("lm_head"))


def attention(model: Model, step: StepInput, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """qkv [T, (heads + 2 kv_heads) * dim] -> [T, heads * dim]."""
    p = model.params
    q = rope_and_cache(
        qkv, model.cos, model.sin, step.positions, step.slots, keys, values, model.heads, p.get("qkv_rope_kv")
    )
    out = torch.empty_like(q)
    cached = (q, keys, values, step.table, step.contexts, step.query_start)
    decode_attention(*cached, step.decode, out, p.get("paged_decode_attention"))
    chunk_attention(*cached, step.prefill, step.longest, out, p.get("prefill_attention"))
    return out.view(q.shape[0], -1)
