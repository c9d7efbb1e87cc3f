"""What a benchmark returns, how it is printed and where it is written."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.paths import ROOT


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value beside its goal. `sense` says which side of the goal is good; no goal: the figure is only shown."""

    metric: str
    value: float | str | None
    unit: str
    goal: float | str | None = None
    sense: str = "at least"  # or "at most", "equal"

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        if self.value is None:
            return False
        if self.sense == "equal":
            return self.value == self.goal
        value, goal = float(self.value), float(self.goal)
        return not math.isnan(value) and (value >= goal if self.sense == "at least" else value <= goal)


def machine() -> dict[str, Any]:
    """Processor, cores, kernel and Python of this machine."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def write(name: str, figures: list[Figure]) -> Path:
    """Prints the table and writes build/bench/<name>.json; returns its path."""
    rows = [asdict(f) | {"met": f.met} for f in figures]
    path = ROOT / "build" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "machine": machine(), "figures": rows}, indent=1))
    table = Table(title=f"{name}  ({machine()['cpu']}, {machine()['cores']} cores)")
    for column in ("metric", "value", "unit", "goal", "met"):
        table.add_column(column)
    for f in figures:
        value = f"{f.value:.4g}" if isinstance(f.value, float) else str(f.value)
        goal = "" if f.goal is None else f"{'' if f.sense == 'equal' else f.sense + ' '}{f.goal}"
        table.add_row(f.metric, value, f.unit, goal, {True: "yes", False: "NO", None: ""}[f.met])
    Console(width=140).print(table)
    return path
