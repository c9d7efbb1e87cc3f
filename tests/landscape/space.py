"""The space that searches are compared on: parts of a Llama step on a CPU, or the whole step with six of its parameters.

Scheduling is left out: its settings are judged by traffic alone. So are precisions below the endpoint's and `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from optimizer.agents.programs.program import Program, ProgramError

Choose = Callable[[str, Sequence[Any]], Any]  # name, values -> one of them

WHOLE = "whole_step"
# each row is one choice; two that rewrite the same region are no program
PARTS: Mapping[str, tuple[str, ...]] = {
    "linear": ("", "packed_linear", "small_linear"),
    "qkv": ("", "fused_qkv"),
    "norm": ("", "rms_norm"),
    "gather": ("", "index_select", "paged_attention"),
    "rope": ("", "rolled_rope"),
}
# parameters of the whole step; the first value is the default, which a program's name leaves out
BUILT: Mapping[str, tuple[int, ...]] = {
    "PM_WEIGHT_BITS": (16, 12),
    "PM_PANEL_VECS": (3, 2),
    "PM_PREFETCH": (0, 1024, 4096),
}
READ: Mapping[str, tuple[int, ...]] = {
    "PM_DEAL": (0, 1),
    "PM_SPIN": (4000, 1000, 20000),
    "PM_OWN_NORM_ROWS": (16, 0),
}


def choose(pick: Choose) -> Program | None:
    """The program that `pick` makes of the space's choices, None for parts that do not fit together."""
    if pick("kind", ("parts", WHOLE)) == WHOLE:
        return whole({name: pick(name, values) for name, values in {**BUILT, **READ}.items()})
    return of_parts(pick(name, values) for name, values in PARTS.items())


def whole(values: Mapping[str, int]) -> Program:
    defaults = {name: among[0] for name, among in {**BUILT, **READ}.items()}
    return Program.of([WHOLE], **{name: value for name, value in values.items() if value != defaults[name]})


def of_parts(names: Any) -> Program | None:
    try:
        program = Program.of(name for name in names if name)
    except ProgramError:
        return None
    return program if program.parts else None


@cache
def programs() -> tuple[Program, ...]:
    """All of them, in a fixed order."""
    of = {**BUILT, **READ}
    steps = (whole(dict(zip(of, values, strict=True))) for values in product(*of.values()))
    rest = (program for names in product(*PARTS.values()) if (program := of_parts(names)))
    return tuple(dict.fromkeys([*rest, *steps]))


@cache
def names() -> frozenset[str]:
    return frozenset(program.name for program in programs())


def canonical(program: Program) -> Program:
    """The same program as the space spells it: without values that are the defaults."""
    of = {**BUILT, **READ}
    return Program(program.parts, tuple((k, v) for k, v in program.values if k not in of or v != of[k][0]))


def units(program: Program) -> tuple[str, ...]:
    """What a compiler has to make, equal for programs that differ in values read at run time alone. Empty: nothing."""
    built = [f"{k}={v}" for k, v in program.values if k in BUILT]
    return tuple(" ".join([kernel, *built]) for kernel in program.kernels)
