"""The baseline of grouped-query families that are Llama but for three things: normalised heads, a window, experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract import DECODE, Batch, LoadedModel, Settings

from .experts import mixture
from .llama import Forward as Llama
from .llama import Plan, rotate

__all__ = ["DECODE", "Forward", "Plan", "build", "rotate"]


class Forward(Llama):
    def linear(self, x: Tensor, name: str) -> Tensor:
        """Queries and keys leave their projections normalised head by head, where the model has it so."""
        out = super().linear(x, name)
        if self.config.head_norm and name.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            out = self.norm(out.view(len(x), -1, self.config.head_dim), name.replace("_proj", "_norm")).view_as(out)
        return out

    def mlp(self, i: int, x: Tensor) -> Tensor:
        e = self.config.experts
        if e is None or i not in e.layers:
            return super().mlp(i, x)
        return mixture(x, f"model.layers.{i}", e, self.weights, self.linear)

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        if self.config.sliding_window:
            self.narrow(plan, self.config.sliding_window)
        return plan

    def narrow(self, plan: Plan, window: int) -> None:
        """Only the positions that a step's queries see are read: the last `window` of each."""
        if plan.decode_rows is not None and plan.decode_slots.shape[1] > window:
            length = (plan.decode_mask[:, 0, 0] == 0).sum(-1, keepdim=True)
            seen = (length - window).clamp(min=0) + torch.arange(window)
            plan.decode_slots = plan.decode_slots.gather(1, seen)
            plan.decode_mask = plan.decode_mask.gather(3, seen[:, None, None])
        plan.prefills = [(a, z, slots[-(window + z - a - 1) :]) for a, z, slots in plan.prefills]

    def prefill_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, context, window = q.shape[0], k.shape[0], self.config.sliding_window
        if not window or context <= window:
            return super().prefill_attention(q, k, v)
        mask = torch.ones(n, context, dtype=torch.bool).tril_(context - n).triu_(context - n - window + 1)
        k, v = (t.repeat_interleave(self.group, dim=1).transpose(0, 1)[None] for t in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(0, 1)


def build(model: LoadedModel, settings: Settings) -> Forward:
    return Forward(model, settings)
