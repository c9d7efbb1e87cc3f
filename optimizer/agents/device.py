"""Device: the program for an NVIDIA GPU, where the machine has one, with its weights, graphs and kernels' parameters varied."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kernels.gpu.tunables import CAPABILITY, INT4_GROUPS, KINDS
from kernels.registry import load
from optimizer.agents.base import SearchView
from optimizer.agents.focused import FocusAgent
from optimizer.agents.programs.program import Program

SPLIT_K = "paged_decode_attention.SPLITS"
REASONS = {
    "weights": "the layers' matrices are kept in fewer bits, so that a decode step reads fewer bytes",
    "graphs": "decode steps are launched kernel by kernel: no padding to a captured batch size, and more work for the host",
}


class DeviceAgent(FocusAgent):
    """Its programs replace the whole forward pass and count to the focus on projections, which they contain."""

    name = "device"
    focus = "projections"
    ideas = (("triton",),)
    turns = ("explore", "tune", "tune")

    def limits(self, view: SearchView) -> list[str]:
        """Nothing where there is no GPU: a machine without one lacks nothing that its agents could use."""
        return super().limits(view) if view.machine.gpu else []

    def explore(self, view: SearchView) -> Iterator[Program]:
        """The program as it is, then with weights of fewer bits where the run and the GPU allow them."""
        plain = Program.of(self.ideas[0])
        yield plain
        yield from self._by_worth((plain.plus(weights=kind) for kind in self._lower(view)), view)

    def tune(self, view: SearchView) -> Iterator[Program]:
        """The fastest of its programs that was measured: without graphs, with contexts in pieces, then each parameter."""
        best = self._best()
        if best is None:
            return
        splits = (best.plus(**{SPLIT_K: value}) for value in _values(SPLIT_K))
        without = best.plus(graphs=0) if best.settings.get("graphs", 1) else best
        yield from chain([without], splits, self._shuffled(self._neighbours(best), "tune", best.name))

    def reason(self, name: str, value: object, program: Program) -> str:
        return f"{name} = {value}: {REASONS[name]}." if name in REASONS else super().reason(name, value, program)

    def _best(self) -> Program | None:
        known = [
            (s, p.name, p) for p, s in self.memory.speeds.items() if p.device == "cuda" and p not in self.memory.failed
        ]
        return max(known)[2] if known else None

    def _lower(self, view: SearchView) -> list[str]:
        """Kinds of weights under the endpoint's precision that this run may use and this GPU and model can."""
        gpu = view.machine.gpu
        if view.tolerance != "quantised" or gpu is None:
            return []
        kinds = [kind for kind in KINDS if kind != "same" and gpu.capability >= CAPABILITY[kind]]
        return [kind for kind in kinds if kind != "int4" or all(d % INT4_GROUPS[-1] == 0 for d in _depths(view))]


def _values(key: str) -> tuple[int, ...]:
    """The values of a parameter but its default."""
    operator, name = key.split(".")
    parameter = next(p for p in load(operator, "triton").params if p.name == name)
    return tuple(value for value in parameter.values if value != parameter.default)


def _depths(view: SearchView) -> list[int]:
    """Inner sizes of the layers' products."""
    c = view.config
    attention = int(c.get("num_attention_heads", 0)) * int(c.get("head_dim", 0))
    return [int(c.get("hidden_size", 0)), attention, int(c.get("intermediate_size", 0))]
