"""What a program does, as the coordinates of its cell in the archive (`optimizer/elites.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.precision import SAME, WEIGHTS, of_weights
from optimizer.agents.programs.program import Program, ProgramError
from optimizer.records import Proposal

GROUPS: Mapping[str, str] = {  # slot of a part -> operators that it takes together; `linear` alone is a matter of tiles
    **dict.fromkeys(("qkv", "mlp", "experts", "expert_mlp"), "products"),
    **dict.fromkeys(("norm", "residual", "rope"), "pointwise"),
    **dict.fromkeys(("decode", "prefill"), "attention"),
    **dict.fromkeys(("layout", "store", "gather"), "cache"),
}
WIDE_VECS, TALL_ROWS, WIDE_BLOCK = 3, 8, 128


def traits(proposal: Proposal) -> tuple[str, str, str]:
    """Precision, fusion group and tile class. Of a program that no agent of ours composed, what its proposal declares."""
    program = composed(proposal.name)
    if program is None:
        return declared(proposal.precision), "own source", "library" if proposal.mechanism == "python" else "own"
    return program.precision, fusion(program), tile(program)


def composed(name: str) -> Program | None:
    """The program that the name spells, None for one of another hand."""
    try:
        program = Program.parse(name)
    except ProgramError:
        return None
    return program if all(op.allows(program.values_of(op)) for op in program.operators) else None


def declared(name: str) -> str:
    """`same` where nothing lower than the endpoint's dtype was declared: older records name the dtype itself."""
    return name if "kv-int8" in name or of_weights(name) in WEIGHTS[1:] else SAME


def fusion(program: Program) -> str:
    slots = {slot for part in program.chosen for slot in part.slots}
    groups = sorted({GROUPS[slot] for slot in slots if slot in GROUPS})
    if len(groups) == len(set(GROUPS.values())) and any({"linear", "decode"} <= p.slots for p in program.chosen):
        return "whole step"
    return " + ".join(groups) or "apart"


def tile(program: Program) -> str:
    """Of the first operator that has a tile for products; `library` where none has, as oneDNN's then counts."""
    for op in program.operators:
        values = op.resolve(program.values_of(op))
        if "PM_PANEL_VECS" in values:
            if not values.get("PM_LAYOUT", 1):
                return "unpacked"
            wide = values["PM_PANEL_VECS"] >= WIDE_VECS
            return "wide" if wide else "tall" if values["PM_ROW_TILE"] >= TALL_ROWS else "small"
        if "LARGE_BLOCK_N" in values:
            return "wide" if values["LARGE_BLOCK_N"] >= WIDE_BLOCK else "small"
    return "library"
