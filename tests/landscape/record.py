"""Measures every program of the space once and writes the record.

    python -m tests.landscape.record                everything, some fifteen minutes of a machine with nothing else to do
    python -m tests.landscape.record --seconds 100  a slice of it: goes on where the last one stopped

Each program is timed in turns with one reference, the whole step as it comes, so that slices agree however the machine drifts.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

from engine.artifacts import Artifact
from engine.client import HostFailure
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.lab import Lab
from optimizer.measure.tiers import Rule, TierTwo, TooFast, WrongValues
from tests.bench.figures import machine
from tests.bench.searching import as_proposal, demo_lab
from tests.landscape import space
from tests.landscape.table import PATH, Landscape, Row, kind, middle
from tests.paths import ROOT

DATA = ROOT / "build" / "landscape"
REFERENCE = Program.of([space.WHOLE])
BASELINE = "baseline"
PAIRS, FEWER_PAIRS, ROUNDS = 10, 5, 5  # of tier 1: of the whole step, of what is a third as fast; of tier 2
NEAR = 0.93  # of the reference's speed at tier 1, from where a program may win
WORST_ROW_S = 10.0  # no program is begun with less time than this left


def record(seconds: float = float("inf"), path: Path = PATH) -> int:
    """Adds to the record at `path` for so long. How many measurements are left to do."""
    end = time.monotonic() + seconds
    with demo_lab(DATA, 36000) as (_, _, lab):
        recorder = Recorder(lab, path)
        while (left := recorder.left()) and time.monotonic() < end - WORST_ROW_S:
            name, tier = left[0]
            recorder.add(name, tier)
        return len(left)


class Recorder:
    def __init__(self, lab: Lab, path: Path) -> None:
        self.lab, self.path, self.builder = lab, path, Builder(DATA)
        self.found = (
            Landscape.read(path) if path.is_file() else Landscape(about_this(lab), REFERENCE.name, BASELINE, {})
        )
        self.rows, self.builds = dict(self.found.rows), dict(self.found.builds)
        self.links: list[float] = []
        self.reference = self._built(REFERENCE)
        self.two: TierTwo | None = None

    def left(self) -> list[tuple[str, int]]:
        """Tier 1 of all, the baseline first; then tier 2 where it pays, best first."""
        first = [n for n in (BASELINE, *(p.name for p in space.programs())) if n not in self.rows]
        if first:
            return [(name, 1) for name in first]
        second = [n for n in self.rows if self.pays(n) and not self.rows[n].second and not self.rows[n].failure]
        return [(n, 2) for n in sorted(second, key=lambda n: (n != BASELINE, -middle(self.rows[n].first)))]

    def pays(self, name: str) -> bool:
        """What may win, and of the others every third: enough to say what tier 2 makes of tier 1."""
        near = bool(self.rows[name].first) and middle(self.rows[name].first) > math.log(NEAR)
        return name == BASELINE or near or list(self.rows).index(name) % 3 == 0

    def add(self, name: str, tier: int) -> None:
        try:
            artifact = self._artifact(name)
            row = self._first(name, artifact) if tier == 1 else self._second(self.rows[name], artifact)
        except (HostFailure, WrongValues, TooFast) as failure:
            row = replace(self.rows.get(name, Row(name)), failure=str(failure))
        self.rows[name] = row
        link_s = statistics.median(self.links) if self.links else self.found.link_s
        self.found = replace(self.found, rows=self.rows, builds=self.builds, link_s=link_s)
        self.found.write(self.path)
        print(f"tier {tier}  {name}  {row.failure or f'{self.found.speed(name, tier):.3f}x'}", flush=True)

    def _artifact(self, name: str) -> Artifact:
        if name == BASELINE:
            base = self.lab.baseline
            return self.lab.artifacts.put(
                base.files(), name="baseline, recorded", settings=dict(base.manifest.settings)
            )
        if name == REFERENCE.name:  # against its own twin
            return self._built(REFERENCE, "its twin")
        return self._built(Program.parse(name))

    def _built(self, program: Program, mark: str = "") -> Artifact:
        """Raises WrongValues for what does not compile. A unit that an earlier, lost record compiled is compiled again."""
        new = [u for u in space.units(program) if u not in self.builds]
        mark = mark or (f"timed {time.time()}" if new else "")
        start = time.perf_counter()
        built = self.builder.build(as_proposal(program, mark=mark))
        seconds = time.perf_counter() - start
        if built.failure:
            raise WrongValues(built.failure)
        if new:
            self.builds |= {unit: seconds / len(new) for unit in new}
        elif built.kind == "cpp_cached":
            self.links.append(seconds)
        return built.artifact if "timed" not in mark else self._built(program)

    def _first(self, name: str, artifact: Artifact) -> Row:
        pairs = PAIRS if name == BASELINE or kind(name) == "whole" else FEWER_PAIRS
        self.lab.one.rule = Rule(0.0, looks=(pairs,), limit_s=60.0)
        start = time.perf_counter()
        found = self.lab.one.measure(artifact, 60.0, self.reference)
        load_s = time.perf_counter() - start - found.device_s
        ratios = found.ratio.ratios
        return Row(name, found.behaviour, first=ratios, load_s=load_s, pair_s=found.device_s / len(ratios))

    def _second(self, row: Row, artifact: Artifact) -> Row:
        if self.two is None:  # all layers, the reference in the baseline's place
            rule = Rule(0.0, looks=(ROUNDS,), limit_s=60.0)
            self.two = replace(self.lab.two, baseline=self.reference, rule=rule)
        start = time.perf_counter()
        found = self.two.measure(artifact, None)
        self.two.keep()
        seconds, ratios = time.perf_counter() - start, found.ratio.ratios
        own_s = self.two.slice_tokens / found.metrics["output_tput"]  # of a turn
        round_s = own_s * (1 + found.ratio.ratio)
        return replace(row, second=ratios, open_s=max(0.0, seconds - round_s * len(ratios)), turn_s=own_s)


def about_this(lab: Lab) -> dict:
    """Where and when, and what a search there knows before it measures anything."""
    return {
        "machine": machine(),
        "date": date.today().isoformat(),
        "torch": lab.scene.environment()["torch"],
        "compiler": lab.scene.environment()["compiler"],
        "python": platform.python_version(),
        "ceilings": lab.scene.ceilings,
        "threads": lab.scene.threads,
        "work": asdict(lab.work),
        "floors": lab.cost.floors,
        "noise": lab.noise,
        "spread": asdict(lab.spread),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    left = record(parser.parse_args().seconds)
    print(f"{left} measurements are left: run it again" if left else "complete")
