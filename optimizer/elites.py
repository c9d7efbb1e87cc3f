"""The archive of MAP-Elites: the best program of each cell, where a cell says what a program does and not how it is written.

After Mouret and Clune, "Illuminating search spaces by mapping elites" (2015, arXiv:1504.04909). Pure data: it holds what was
told, whatever the order, so a resumed run that tells everything again has the same archive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from optimizer.records import MEASURED, Candidate, Experiment, State


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A kind of program. `bottleneck` is what its time goes to: bytes, barrier (waiting, calls included) or arithmetic."""

    precision: str  # a name of kernels.precision
    fusion: str  # operators that are taken together
    tile: str  # class of the products' tile
    bottleneck: str

    @property
    def name(self) -> str:
        return f"{self.precision}, {self.fusion}, {self.tile} tile, {self.bottleneck}"


@dataclass(frozen=True, slots=True)
class Elite:
    """A measured program in its cell. `ratio` is its speed over the baseline, at the highest tier it came to."""

    cell: Cell
    artifact_hash: str
    name: str
    agent: str
    ratio: float
    ci_low: float
    ci_high: float
    tier: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"cell": asdict(self.cell) | {"name": self.cell.name}}


class Archive:
    """Keeps every measured program once; a cell's best is the one whose interval has the highest lower end."""

    def __init__(self) -> None:
        self._members: dict[str, Elite] = {}

    def told(self, candidate: Candidate, experiment: Experiment, cell: Callable[[float], Cell]) -> None:
        """A higher tier or a later visit replaces what was known of the program; one that failed leaves. `cell`: of a ratio."""
        digest = candidate.artifact_hash
        if experiment.state is State.FAILED:
            self._members.pop(digest, None)
            return
        known = self._members.get(digest)
        if experiment.state not in MEASURED or (known and known.tier > experiment.tier):
            return
        ratio, low, high = experiment.ratio or 0.0, experiment.ci_low or 0.0, experiment.ci_high or 0.0
        found = Elite(cell(ratio), digest, candidate.name, candidate.agent, ratio, low, high, experiment.tier)
        self._members[digest] = found

    def elites(self) -> tuple[Elite, ...]:
        """One for each cell that was reached, in the order of cells."""
        best: dict[Cell, Elite] = {}
        for member in self._members.values():
            held = best.get(member.cell)
            if held is None or _surely(member) > _surely(held):
                best[member.cell] = member
        return tuple(best[cell] for cell in sorted(best))


def _surely(elite: Elite) -> tuple[float, float, str]:
    return elite.ci_low, elite.ratio, elite.artifact_hash
