"""The record: what was measured of each program of the space, and on which machine. Seconds; ratios are speeds, higher is faster."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.paths import ROOT

PATH = ROOT / "build" / "landscape.json"  # what this machine recorded
KEPT = ROOT / "tests" / "data" / "landscape.json"  # a record of ours: machine and date stand in it


class NotRecorded(KeyError):
    """A program that the record does not hold."""

    def __str__(self) -> str:
        return f"{self.args[0]} is not recorded: record the whole space with `python -m tests.landscape.record`"


@dataclass(frozen=True, slots=True)
class Row:
    """One program. `first` and `second` are paired ratios over the reference program at tier 1 and 2, in the order measured."""

    name: str
    behaviour: str = ""
    failure: str = ""
    first: tuple[float, ...] = ()
    second: tuple[float, ...] = ()  # empty: tier 2 was not measured
    load_s: float = 0.0  # tier 1: to load, trace, check and let go of
    pair_s: float = 0.0  # tier 1: a pair with the reference
    open_s: float = 0.0  # tier 2: to load and check
    turn_s: float = 0.0  # tier 2: its own turn of a round


@dataclass(frozen=True)  # without slots: what is worked out of the rows is kept
class Landscape:
    """`about`: machine, date, workload, floors, ceilings, noise. `builds`: seconds of each unit; `link_s`: of a library."""

    about: Mapping[str, Any]
    reference: str
    baseline: str  # the row that ratios over the baseline are taken through
    rows: Mapping[str, Row]
    builds: Mapping[str, float] = field(default_factory=dict)
    link_s: float = 0.1

    def row(self, name: str) -> Row:
        """Raises NotRecorded."""
        try:
            return self.rows[name]
        except KeyError:
            raise NotRecorded(name) from None

    def speed(self, name: str, tier: int) -> float:
        """Over the baseline. No two programs here differ by their scheduling, so both tiers say how fast one is at tier 2:
        tier 1 with what the tiers usually differ by, each weighed by its number of measurements and their scatter.
        """
        row, base = self.row(name), self.row(self.baseline)
        first = middle(row.first) - middle(base.first)
        if tier == 1 or name == self.baseline:
            return math.exp(first)
        foreseen, sure = first + self.deeper[kind(name)], len(row.first) / self.variance[1]
        if not row.second:
            return math.exp(foreseen)
        more = len(row.second) / self.variance[2]
        second = middle(row.second) - middle(base.second)
        return math.exp((foreseen * sure + second * more) / (sure + more))

    @cached_property
    def deeper(self) -> dict[str, float]:
        """Log of tier 2's ratio over tier 1's by kind of program, the median of those that have both."""
        base, found = self.row(self.baseline), defaultdict(list)
        for name, row in self.rows.items():
            if row.first and row.second and name != self.baseline:
                first, second = middle(row.first) - middle(base.first), middle(row.second) - middle(base.second)
                found[kind(name)].append(second - first)
        return {k: statistics.median(found[k] or [0.0]) for k in ("whole", "parts")}

    @cached_property
    def scatter(self) -> dict[int, list[float]]:
        """By tier, logs of single measurements over the middle of their program's: of all programs, as each has few."""
        found: dict[int, list[float]] = {1: [], 2: []}
        for row in self.rows.values():
            for tier, ratios in ((1, row.first), (2, row.second)):
                if len(ratios) > 2:
                    wider = math.sqrt(len(ratios) / (len(ratios) - 1))
                    found[tier] += [wider * (math.log(r) - middle(ratios)) for r in ratios]
        return {tier: logs or [0.0] for tier, logs in found.items()}

    @cached_property
    def variance(self) -> dict[int, float]:
        """Of a single measurement, from the quartiles: outliers do not count."""
        quartiles = {tier: statistics.quantiles(logs, n=4) for tier, logs in self.scatter.items() if len(logs) > 3}
        return {1: 1.0, 2: 1.0} | {tier: ((q[2] - q[0]) / 1.349) ** 2 for tier, q in quartiles.items()}

    @cached_property
    def best(self) -> float:
        return max(self.speed(n, 2) for n, row in self.rows.items() if row.first)

    def write(self, path: Path = PATH) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded(asdict(self)), indent=None, separators=(",", ":")))

    @classmethod
    def read(cls, path: Path = PATH) -> Landscape:
        """Raises NotRecorded where nothing was."""
        if not path.is_file():
            raise NotRecorded(str(path))
        data = json.loads(path.read_text())
        rows = {n: Row(**r | {k: tuple(r[k]) for k in ("first", "second")}) for n, r in data.pop("rows").items()}
        return cls(**data, rows=rows)


def kind(name: str) -> str:
    return "whole" if name.startswith("whole_step") else "parts"


def middle(ratios: Sequence[float]) -> float:
    """The mean of the middle half of their logs: a pair that other work overlapped does not count."""
    logs = sorted(map(math.log, ratios))
    cut = len(logs) // 4
    return statistics.fmean(logs[cut : len(logs) - cut])


def rounded(value: Any) -> Any:
    """Numbers to five digits, so that a record stays small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value
