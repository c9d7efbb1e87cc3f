"""A mixture of experts in plain torch, float32: one expert after another."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_mlp.reference import gated
from kernels.small_m_matmul.reference import linear


def route(logits: Tensor, top_k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> (float32 shares, int64 expert ids), both [T, top_k]; with `normalise` shares sum to one."""
    shares, ids = logits.float().softmax(-1).topk(top_k)
    return (shares / shares.sum(-1, keepdim=True) if normalise else shares), ids


def experts_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """x [T, hidden], gate and up [experts, ffn, hidden], down [experts, hidden, ffn] -> float32 [T, hidden]."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        y = linear(gated(x[token], gate[expert], up[expert]), down[expert])
        out.index_add_(0, token, y * shares[token, choice][:, None])
    return out
