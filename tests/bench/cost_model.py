"""How far the cost model is off on what it was not fitted on: published serving points by model, this machine's forwards by
shape, program and program family.

The points lie outside the repository (tests/paths.py); without them their half is left out. A program or family that is held
out is told six measured forwards of its own (`CALIBRATION`), as a search measures a new candidate; what it would be without
any is shown beside.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimizer.cost.forwards import Forward, ForwardEstimate, ForwardModel
from optimizer.cost.points import read_points
from optimizer.cost.roofline import Ceilings
from optimizer.cost.serving_fit import HeldOut, devices, hold_out, models
from tests.bench import step_times
from tests.bench.figures import Figure
from tests.paths import SHARED

POINTS = SHARED / "truth" / "measured_serving_points.csv"
FOLDS = 5
CALIBRATION = (
    step_times.Shape(1, 128),
    step_times.Shape(8, 512),
    step_times.Shape(16, 128),
    step_times.Shape(prefill=256),
    step_times.Shape(prefill=64, past=1024),
    step_times.Shape(prefill=32),
)


@dataclass(frozen=True, slots=True)
class Measured:
    program: str
    family: str
    shape: step_times.Shape
    seconds: float

    @property
    def forward(self) -> Forward:
        return Forward(self.shape.batch, self.shape.prefill, self.shape.kv_tokens)

    @property
    def kind(self) -> str:
        return "mixed" if self.shape.batch and self.shape.prefill else "prefill" if self.shape.prefill else "decode"


Guess = tuple[Measured, ForwardEstimate]


def run() -> list[Figure]:
    return published() + this_machine()


def published() -> list[Figure]:
    if not POINTS.is_file():
        return [Figure("published serving points", f"not at {POINTS}", "")]
    held_out = hold_out(read_points(POINTS))
    return of_devices(held_out) + of_folds(held_out)


def of_devices(held_out: HeldOut) -> list[Figure]:
    """Median errors with each architecture held out in turn, and their share of the plain roofline's."""
    figures = []
    for device in devices(held_out.points):
        for what in ("ttft", "tpot"):
            ours, plain = (float(np.median(e(what, device))) for e in (held_out.errors, held_out.plain_errors))
            name = f"{device}, {what.upper()}"
            figures.append(Figure(f"{name}: median error ({held_out.of(device).sum()} points)", ours, ""))
            figures.append(Figure(f"{name}: plain roofline's", plain, ""))
            figures.append(Figure(f"{name}: share of it", ours / plain, "x", 0.5, "at most"))
    return figures


def of_folds(held_out: HeldOut) -> list[Figure]:
    figures = []
    for model in models(held_out.points):
        for device in devices(held_out.points):
            if held_out.of(device, model).any():
                found = [float(np.median(held_out.errors(what, device, model))) for what in ("ttft", "tpot")]
                words = " / ".join(f"{e:.1%}" for e in found)
                figures.append(Figure(f"{model} held out, on {device}: TTFT / TPOT", words, "median error"))
    return figures


def this_machine() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        config, ceilings, rows = step_times.run(Path(folder))
    steps = [Measured(*row) for row in rows]

    def fresh() -> ForwardModel:
        return ForwardModel(config, step_times.DTYPE, Ceilings.of(ceilings, step_times.DTYPE))

    return of_splits(steps, fresh)


def of_splits(steps: Sequence[Measured], fresh: Callable[[], ForwardModel]) -> list[Figure]:
    figures = [Figure("whole forwards measured here", len(steps), "forwards")]
    for name, guesses in (
        ("shape", list(by_shape(steps, fresh))),
        ("program", list(by_group(steps, fresh, lambda m: m.program))),
        ("program family", list(by_group(steps, fresh, lambda m: m.family))),
    ):
        figures.append(Figure(f"held out by {name}: median error", median_error(guesses), "", 0.10, "at most"))
        inside = float(np.mean([g.low <= m.seconds <= g.high for m, g in guesses]))
        figures.append(Figure(f"held out by {name}: within its interval", inside, ""))
        for program in dict.fromkeys(m.program for m in steps):
            own = [g for g in guesses if g[0].program == program]
            figures.append(Figure(f"held out by {name}: {program}", median_error(own), ""))
        for kind in ("decode", "prefill", "mixed"):
            own = [g for g in guesses if g[0].kind == kind]
            figures.append(Figure(f"held out by {name}: {kind} forwards", median_error(own), ""))
    roofline = [(m, fresh().predict(m.program, m.forward)) for m in steps]
    return [*figures, Figure("roofline alone, nothing measured: median error", median_error(roofline), "")]


def by_shape(steps: Sequence[Measured], fresh: Callable[[], ForwardModel]) -> Iterator[Guess]:
    """Each fold's shapes are unknown of every program."""
    shapes = list(dict.fromkeys(m.shape for m in steps))
    random.Random(7).shuffle(shapes)
    fold = {shape: i % FOLDS for i, shape in enumerate(shapes)}
    for k in range(FOLDS):
        yield from guess([m for m in steps if fold[m.shape] != k], [m for m in steps if fold[m.shape] == k], fresh)


def by_group(
    steps: Sequence[Measured], fresh: Callable[[], ForwardModel], group: Callable[[Measured], str]
) -> Iterator[Guess]:
    """Each program is told `CALIBRATION` of its own and everything of the programs that are not of its group."""
    for program in dict.fromkeys(m.program for m in steps):
        own = [m for m in steps if m.program == program]
        others = [m for m in steps if group(m) != group(own[0])]
        told = [m for m in own if m.shape in CALIBRATION]
        yield from guess([*others, *told], [m for m in own if m.shape not in CALIBRATION], fresh)


def guess(known: Sequence[Measured], asked: Sequence[Measured], fresh: Callable[[], ForwardModel]) -> Iterator[Guess]:
    model = fresh()
    for m in known:
        model.learn(m.program, m.forward, m.seconds)
    yield from ((m, model.predict(m.program, m.forward)) for m in asked)


def median_error(guesses: Sequence[Guess]) -> float:
    return float(np.median([abs(g.seconds / m.seconds - 1) for m, g in guesses]))
