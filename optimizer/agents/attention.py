"""Attention: how queries meet the cached keys and values."""

from __future__ import annotations

from optimizer.agents.focused import FocusAgent


class AttentionAgent(FocusAgent):
    name = focus = "attention"
    ideas = (
        ("paged_attention",),
        ("bmm_decode", "index_select"),
        ("expand_prefill", "rolled_rope"),
        ("sequence_decode",),
    )
