"""Projections: the matrix products that read the weights, and their layout in memory."""

from __future__ import annotations

from optimizer.agents.focused import FocusAgent


class ProjectionsAgent(FocusAgent):
    name = focus = "projections"
    ideas = (
        ("packed_linear",),
        ("small_linear", "fused_qkv"),
        ("split_linear", "fused_qkv", "fused_gate_up"),
        ("packed_linear", "fused_qkv", "postops"),
        ("fused_qkv", "fused_gate_up"),
        ("small_linear", "fused_heads"),
        ("split_linear", "fused_heads", "fused_gate_up"),
        ("grouped_experts",),
        ("grouped_experts", "split_linear"),
    )
