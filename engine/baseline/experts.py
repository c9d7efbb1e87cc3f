"""A mixture of experts in plain PyTorch: one gated MLP for the tokens sent to it, expert by expert."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract import Experts

Linear = Callable[[Tensor, str], Tensor]  # x [T, in], name of a projection -> [T, out]


def mixture(x: Tensor, layer: str, e: Experts, weights: Mapping[str, Tensor], linear: Linear) -> Tensor:
    """x [T, hidden] through the experts of `layer`. Shares are kept and summed in float32."""
    block = f"{layer}.{e.block}"
    logits = F.linear(x.float(), weights[f"{block}.gate.weight"].float())
    shares, chosen = choose(logits, e, weights.get(f"{block}.gate.e_score_correction_bias"))
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        row, place = torch.where(chosen == expert)
        names = (f"{block}.experts.{expert}.{part}" for part in (e.gate, e.up, e.down))
        out.index_add_(0, row, gated(x[row], *names, linear) * shares[row, place, None])
    out = out.to(x.dtype)
    if e.shared_size:
        out = out + gated(x, *(f"{block}.shared_experts.{part}_proj" for part in ("gate", "up", "down")), linear)
    return out


def gated(x: Tensor, gate: str, up: str, down: str, linear: Linear) -> Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def choose(logits: Tensor, e: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Router logits [T, experts] -> shares (float32) and numbers of the experts chosen, both [T, per_token]."""
    scores = logits.sigmoid() if e.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if e.groups > 1:
        ranked = ranked.masked_fill(~in_best_groups(ranked, e, 1 if correction is None else 2), 0.0)
    chosen = ranked.topk(e.per_token, dim=-1).indices
    shares = scores.gather(1, chosen)
    if e.normalise:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * e.scale, chosen


def in_best_groups(ranked: Tensor, e: Experts, best: int) -> Tensor:
    """Bool [T, experts]: whether the expert is in one of the groups kept. A group is worth the sum of its `best` best."""
    groups = ranked.view(len(ranked), e.groups, -1)
    worth = groups.topk(best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(e.groups_kept, dim=-1).indices, True)
    return kept[..., None].expand_as(groups).reshape(ranked.shape)
