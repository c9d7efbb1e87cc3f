"""Fusion: fewer, larger calls, up to one C++ call for the whole step."""

from __future__ import annotations

from optimizer.agents.focused import FocusAgent


class FusionAgent(FocusAgent):
    """Fuses across operators. Its programs count to the focus on projections, which they contain."""

    name = "fusion"
    focus = "projections"
    ideas = (
        ("whole_step",),
        ("rms_norm",),
        ("quantised_linear", "fused_qkv"),
        ("packed_linear", "postops", "rms_norm"),
        ("compiled_pointwise",),
        ("sorted_experts", "fused_experts"),
        ("grouped_experts", "packed_linear", "rms_norm"),
    )
    turns = ("explore", "tune", "explore", "tune", "combine", "tune")
