"""The baseline: a Llama forward pass in plain PyTorch over a paged KV cache. Every candidate is compared with this."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract import DECODE, Batch, KVPool, LoadedModel, Settings, rope_table


class Forward:
    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.config = c = model.config
        self.weights = model.weights
        self.block_size = int(settings.get("block_size", 16))
        self.dtype = model.weights["model.embed_tokens.weight"].dtype
        self.cos, self.sin = model.memo(f"rope:{self.dtype}", lambda: rope_table(c, self.dtype))
        self.group = c.num_attention_heads // c.num_key_value_heads
        self.head = model.weights.get("lm_head.weight", model.weights["model.embed_tokens.weight"])

    def allocate(self, blocks: int) -> KVPool:
        c = self.config
        shape = (blocks, self.block_size, c.num_key_value_heads, c.head_dim)
        tensors = tuple(torch.zeros(shape, dtype=self.dtype) for _ in range(2 * c.num_hidden_layers))
        return KVPool(tensors, self.block_size, sum(t[0].nbytes for t in tensors) if blocks else 0)

    def __call__(self, batch: Batch, kv: KVPool) -> Tensor:
        c = self.config
        plan = self.plan(batch)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        x = F.embedding(batch.token_ids, self.weights["model.embed_tokens.weight"])
        for i in range(c.num_hidden_layers):
            keys, values = (t.view(-1, c.num_key_value_heads, c.head_dim) for t in kv.tensors[2 * i : 2 * i + 2])
            x = x + self.attention(i, self.norm(x, f"model.layers.{i}.input_layernorm"), cos, sin, keys, values, batch, plan)
            x = x + self.mlp(i, self.norm(x, f"model.layers.{i}.post_attention_layernorm"))
        x = self.norm(x[batch.logit_rows], "model.norm")
        return F.linear(x, self.head).float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.weights[f"{name}.weight"] * h.to(self.dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def mlp(self, i: int, x: Tensor) -> Tensor:
        p = f"model.layers.{i}.mlp"
        return self.linear(F.silu(self.linear(x, f"{p}.gate_proj")) * self.linear(x, f"{p}.up_proj"), f"{p}.down_proj")

    def attention(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: "Plan") -> Tensor:
        c, p = self.config, f"model.layers.{i}.self_attn"
        q = rotate(self.linear(x, f"{p}.q_proj").view(-1, c.num_attention_heads, c.head_dim), cos, sin)
        k = rotate(self.linear(x, f"{p}.k_proj").view(-1, c.num_key_value_heads, c.head_dim), cos, sin)
        v = self.linear(x, f"{p}.v_proj").view(-1, c.num_key_value_heads, c.head_dim)
        keys.index_copy_(0, batch.slot, k)
        values.index_copy_(0, batch.slot, v)
        out = torch.empty_like(q)
        if plan.decode_rows is not None:
            out[plan.decode_rows] = self.decode_attention(q[plan.decode_rows], keys, values, plan)
        for first, last, slots in plan.prefills:
            out[first:last] = self.prefill_attention(q[first:last], keys[slots], values[slots])
        return self.linear(out.view(-1, c.num_attention_heads * c.head_dim), f"{p}.o_proj")

    def decode_attention(self, q: Tensor, keys: Tensor, values: Tensor, plan: "Plan") -> Tensor:
        """q [D, heads, dim], one token a sequence. The query heads of a KV head are taken as its query rows: no repeat."""
        c = self.config
        k, v = (t[plan.decode_slots].transpose(1, 2) for t in (keys, values))
        q = q.view(-1, c.num_key_value_heads, self.group, c.head_dim)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=plan.decode_mask).reshape(-1, c.num_attention_heads, c.head_dim)

    def prefill_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, dim] are the last n of k's positions; k and v [context, kv_heads, dim]."""
        n, context = q.shape[0], k.shape[0]
        mask = None
        if n < context:
            mask = torch.ones(n, context, dtype=torch.bool).tril_(context - n)
        k, v = (t.repeat_interleave(self.group, dim=1).transpose(0, 1)[None] for t in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None)
        return out[0].transpose(0, 1)

    def plan(self, batch: Batch) -> "Plan":
        return Plan(batch, self.block_size, self.dtype)


class Plan:
    """Where each sequence's cached rows lie, worked out once a step and used by every layer."""

    def __init__(self, batch: Batch, block_size: int, dtype: torch.dtype) -> None:
        start, context, table = batch.query_start.tolist(), batch.context_len.tolist(), batch.block_table.long()
        decode = [s for s, phase in enumerate(batch.phase.tolist()) if phase == DECODE]
        self.decode_rows: Tensor | None = None
        if decode:
            rows, longest = torch.tensor(decode), max(context[s] for s in decode)
            position = torch.arange(longest)
            held = position < batch.context_len[rows, None]
            # past a sequence's end its own first row is read and masked: what lies in unused slots is never touched
            position = position * held
            self.decode_rows = batch.query_start[rows].long()
            self.decode_slots = table[rows[:, None], position // block_size] * block_size + position % block_size
            self.decode_mask = torch.zeros(held.shape, dtype=dtype).masked_fill_(~held, float("-inf"))[:, None, None]
        self.prefills = []
        for s in sorted(set(range(len(context))) - set(decode)):
            position = torch.arange(context[s])
            self.prefills.append((start[s], start[s + 1], table[s, position // block_size] * block_size + position % block_size))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def build(model: LoadedModel, settings: Settings) -> Forward:
    return Forward(model, settings)
