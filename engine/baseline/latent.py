"""The baseline of latent-attention families (DeepSeek-V2 and V3): the cache holds one compressed row a token, for all heads.

A decode step never expands the cache: a query is taken into the latent space, attends there, and the result is taken
out again (DeepSeek-V2, section 2.1.2: the up-projections are absorbed). A prefill expands its keys and values once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract import DECODE, Batch, KVPool, LoadedModel, Settings, magnitude

from .experts import mixture
from .llama import Forward as Llama
from .llama import Plan, rotate

__all__ = ["DECODE", "Forward", "Plan", "build", "rotate"]
LATENT_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others


class Forward(Llama):
    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        m, scaling = self.config.latent, self.config.rope_scaling
        self.scale = (m.nope_dim + m.rope_dim) ** -0.5
        if scaling is not None and scaling.mscale_all_dim:
            self.scale *= magnitude(scaling.factor, scaling.mscale_all_dim) ** 2

    def allocate(self, blocks: int) -> KVPool:
        """A tensor a layer, [blocks, block_size, latent | rotated key]."""
        shape = (blocks, self.block_size, self.config.kv_width)
        tensors = tuple(torch.zeros(shape, dtype=self.dtype) for _ in range(self.config.num_hidden_layers))
        return KVPool(tensors, self.block_size, sum(t[0].nbytes for t in tensors) if blocks else 0)

    def __call__(self, batch: Batch, kv: KVPool) -> Tensor:
        plan = self.plan(batch)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        x = F.embedding(batch.token_ids, self.weights["model.embed_tokens.weight"])
        for i, tensor in enumerate(kv.tensors):
            cache = tensor.view(-1, self.config.kv_width)
            x = x + self.attention(i, self.norm(x, f"model.layers.{i}.input_layernorm"), cos, sin, cache, batch, plan)
            x = x + self.mlp(i, self.norm(x, f"model.layers.{i}.post_attention_layernorm"))
        x = self.norm(x[batch.logit_rows], "model.norm")
        return F.linear(x, self.head).float()

    def mlp(self, i: int, x: Tensor) -> Tensor:
        e = self.config.experts
        if i not in e.layers:
            return super().mlp(i, x)
        return mixture(x, f"model.layers.{i}", e, self.weights, self.linear)

    def norm(self, x: Tensor, name: str) -> Tensor:
        if not name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            return super().norm(x, name)
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + LATENT_EPS)
        return self.weights[f"{name}.weight"] * h.to(self.dtype)

    def attention(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: Batch, plan: Plan) -> Tensor:
        """x [T, hidden]; cache [slots, latent | rotated key]."""
        m, p = self.config.latent, f"model.layers.{i}.self_attn"
        q, q_rope = self.queries(x, p).split([m.nope_dim, m.rope_dim], dim=-1)
        latent, k_rope = self.linear(x, f"{p}.kv_a_proj_with_mqa").split([m.kv_rank, m.rope_dim], dim=-1)
        q_rope, k_rope = (rotate(self.halves(t), cos, sin) for t in (q_rope, k_rope[:, None]))
        rows = torch.cat([self.norm(latent, f"{p}.kv_a_layernorm"), k_rope[:, 0]], dim=-1)
        cache.index_copy_(0, batch.slot, rows)
        up = self.weights[f"{p}.kv_b_proj.weight"].view(-1, m.nope_dim + m.value_dim, m.kv_rank)
        out = x.new_empty(len(x), self.config.num_attention_heads, m.value_dim)
        if plan.decode_rows is not None:
            r = plan.decode_rows
            out[r] = self.decode_attention(q[r], q_rope[r], cache[plan.decode_slots], up, plan)
        for first, last, slots in plan.prefills:
            out[first:last] = self.prefill_attention(q[first:last], q_rope[first:last], cache[slots], up)
        return self.linear(out.flatten(1), f"{p}.o_proj")

    def queries(self, x: Tensor, p: str) -> Tensor:
        """[T, heads, nope | rope]."""
        if self.config.latent.q_rank:
            q = self.linear(self.norm(self.linear(x, f"{p}.q_a_proj"), f"{p}.q_a_layernorm"), f"{p}.q_b_proj")
        else:
            q = self.linear(x, f"{p}.q_proj")
        return q.view(len(x), self.config.num_attention_heads, -1)

    def halves(self, x: Tensor) -> Tensor:
        """Rotated pairs that lie side by side put half a head apart; a score does not see the order of dimensions."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.config.latent.interleaved else x

    def decode_attention(self, q: Tensor, q_rope: Tensor, rows: Tensor, up: Tensor, plan: Plan) -> Tensor:
        """q [D, heads, nope], rows [D, context, latent | rotated key] -> [D, heads, value]. One head of keys serves all."""
        m = self.config.latent
        k_up, v_up = up.split([m.nope_dim, m.value_dim], dim=1)
        inside = torch.einsum("dhn,hnr->dhr", q, k_up)
        query, keys = (
            torch.cat([inside, q_rope], dim=-1)[:, None],
            rows[:, None],
        )  # heads are the query rows of one head
        mask, values = plan.decode_mask, keys[..., : m.kv_rank]
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scale)
        return torch.einsum("dhr,hvr->dhv", found[:, 0], v_up)

    def prefill_attention(self, q: Tensor, q_rope: Tensor, rows: Tensor, up: Tensor) -> Tensor:
        """q [n, heads, nope] are the last n of rows' positions; rows [context, latent | rotated key] -> [n, heads, value]."""
        m, n, context = self.config.latent, len(q), len(rows)
        k, v = torch.einsum("cr,hor->hco", rows[:, : m.kv_rank], up).split([m.nope_dim, m.value_dim], dim=-1)
        k = torch.cat([k, rows[None, :, m.kv_rank :].expand(len(k), -1, -1)], dim=-1)
        query = torch.cat([q, q_rope], dim=-1).transpose(0, 1)
        mask = torch.ones(n, context, dtype=torch.bool).tril_(context - n)
        return F.scaled_dot_product_attention(query[None], k[None], v[None], attn_mask=mask, scale=self.scale)[
            0
        ].transpose(0, 1)


def build(model: LoadedModel, settings: Settings) -> Forward:
    return Forward(model, settings)
