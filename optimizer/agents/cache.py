"""Cache: how keys and values lie in memory, and how they are written and gathered."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.agents.base import SearchView
from optimizer.agents.focused import FocusAgent
from optimizer.agents.programs.program import Program

BLOCK_SIZES = (64, 16, 32, 128)


class CacheAgent(FocusAgent):
    name = focus = "cache"
    ideas = (("joint_kv",), ("index_select",), ("head_major",))
    turns = ("explore", "explore", "combine", "tune")

    def tune(self, view: SearchView) -> Iterator[Program]:
        """The best program's cache in fewer bits, block sizes of it and of the baseline's layout, and how it is cut."""
        best = self.memory.best()
        if {"whole_step", "paged_attention"} & set(best.parts) and best.parameters.get("PM_KV_BITS", 16) == 16:
            yield best.plus(PM_KV_BITS=8)
        for base in (best, Program()):
            now = base.settings.get("block_size", 32 if "whole_step" in base.parts else 16)
            span = base.parameters.get("PM_SPAN", 256)
            yield from (base.plus(block_size=size) for size in BLOCK_SIZES if size != now and span % size == 0)
        if "whole_step" in best.parts and not best.settings.get("layers_apart"):
            yield best.plus(layers_apart=1)

    def reason(self, name: str, value: object, program: Program) -> str:
        if name == "block_size":
            return f"Blocks of {value} tokens: longer ones are fewer pieces to gather, shorter ones waste less memory."
        if name == "layers_apart":
            return "Each layer's blocks lie together: a layer reads its own pool alone instead of skipping over the others'."
        return super().reason(name, value, program)
