"""The record: what was measured of each program of the space, and on which machine. Seconds; ratios are speeds, higher is faster."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.paths import ROOT

PATH = ROOT / "build" / "landscape.json"


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
        """Over the baseline, the geometric mean of what was recorded. At tier 2 without a record: foreseen from tier 1."""
        row, base = self.row(name), self.row(self.baseline)
        if tier == 2 and row.second:
            return mean(row.second) / mean(base.second)
        first = mean(row.first) / mean(base.first)
        return first if tier == 1 else first * self.deeper[_kind(name)]

    @cached_property
    def deeper(self) -> dict[str, float]:
        """Tier 2's ratio over tier 1's by kind of program, the median of those that have both."""
        found = defaultdict(lambda: [1.0])
        for name, row in self.rows.items():
            if row.first and row.second and name != self.baseline:
                found[_kind(name)].append(self.speed(name, 2) / self.speed(name, 1))
        return {kind: statistics.median(ratios[1:] or ratios) for kind, ratios in found.items()}

    def scatter(self, name: str, tier: int) -> tuple[float, ...]:
        """Logs of a single measurement over the mean, as recorded; at tier 2 without a record those of all programs."""
        if name in self._scatter[tier]:
            return self._scatter[tier][name]
        return self._all_scatter[tier]

    @cached_property
    def _scatter(self) -> dict[int, dict[str, tuple[float, ...]]]:
        rows = self.rows.values()
        return {
            1: {row.name: centred(row.first) for row in rows if len(row.first) > 1},
            2: {row.name: centred(row.second, 2) for row in rows if len(row.second) > 1},
        }

    @cached_property
    def _all_scatter(self) -> dict[int, tuple[float, ...]]:
        return {tier: tuple(v for own in found.values() for v in own) for tier, found in self._scatter.items()}

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


def _kind(name: str) -> str:
    return "whole" if name.startswith("whole_step") else "parts"


def mean(ratios: tuple[float, ...]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def centred(ratios: tuple[float, ...], sides: int = 1) -> tuple[float, ...]:
    """Logs around their mean, as wide as the population they are a sample of. A ratio of two is `sides` = 2 for one of them."""
    middle, wider = math.log(mean(ratios)), math.sqrt(len(ratios) / (len(ratios) - 1) / sides)
    return tuple((math.log(r) - middle) * wider for r in ratios)


def rounded(value: Any) -> Any:
    """Numbers to five digits, so that a record stays small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value
