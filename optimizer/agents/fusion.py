"""Fusion: fewer, larger calls, up to one C++ call for the whole step."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.agents.base import SearchView
from optimizer.agents.focused import FocusAgent
from optimizer.agents.programs.program import Program


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

    def tune(self, view: SearchView) -> Iterator[Program]:
        """The whole step on coded weights first, which read a quarter less and change none; then its neighbours."""
        best = self.memory.best()
        if (
            "whole_step" in best.parts
            and best.parameters.get("PM_WEIGHT_BITS", 16) == 16
            and best.parameters.get("PM_LAYOUT", 1)
        ):
            yield best.plus(PM_WEIGHT_BITS=12)
        yield from super().tune(view)
