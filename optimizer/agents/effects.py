"""What each value of a kernel's parameters brings, learned from all programs of the same parts at once.

A single measurement is noisy and says something of every value in it, so the log of a program's speed is taken as a sum over
its values: a Bayesian linear model, whose draws say where to look next (Thompson sampling).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from optimizer.agents.programs.program import Program

VALUE_MEAN, VALUE_SD = (
    -0.02,
    0.05,
)  # of the log of what a value brings, before it was measured: defaults were chosen well
TIER_SD = 0.1  # of the log of what tier 2 differs by from tier 1
LEVEL_SD = 3.0  # the parts' own speed may be anything
NOISE_SD = 0.06  # of the log of a speed as tier 1 measures it


class Effects:
    """Of programs with the same parts: `speeds` over the baseline, as measured at `tiers`. What the tiers differ by, which is
    alike for all of them, is learned too.
    """

    def __init__(self, speeds: Mapping[Program, float], tiers: Mapping[Program, int]) -> None:
        self.values = sorted({item for program in speeds for item in program.parameters.items()})
        rows = np.array([[*self._row(p), tiers.get(p, 1) == 2, 1.0] for p in speeds], float)
        rows = rows.reshape(len(speeds), len(self.values) + 2)
        logs = np.log(np.fromiter(speeds.values(), float, len(speeds)))
        prior = np.diag(1 / np.square([*[VALUE_SD] * len(self.values), TIER_SD, LEVEL_SD]))
        self.covariance = np.linalg.inv(prior + rows.T @ rows / NOISE_SD**2)
        prior_means = np.array([*[VALUE_MEAN] * len(self.values), 0.0, 0.0])
        self.means = prior_means + self.covariance @ rows.T @ (logs - rows @ prior_means) / NOISE_SD**2

    def of(self, program: Program) -> float:
        """The log of what the program's values bring, over another of the same parts."""
        known = float(self.means[: len(self.values)] @ np.array(self._row(program), float))
        return known + VALUE_MEAN * len(program.parameters.items() - set(self.values))

    def draw(self, rng: np.random.Generator) -> Draw:
        """Values as they may well be: near what was learned, far from it where little was."""
        drawn = rng.multivariate_normal(self.means, self.covariance, method="cholesky")
        return Draw(dict(zip(self.values, map(float, drawn), strict=False)), rng)

    def _row(self, program: Program) -> list[bool]:
        items = program.parameters.items()
        return [item in items for item in self.values]


class Draw:
    """One draw. A value that no program had yet gets its own, the same whenever it is asked for."""

    def __init__(self, known: dict[tuple[str, int], float], rng: np.random.Generator) -> None:
        self.known, self.rng = known, rng

    def of(self, program: Program) -> float:
        total = 0.0
        for item in sorted(program.parameters.items()):
            if item not in self.known:
                self.known[item] = float(self.rng.normal(VALUE_MEAN, VALUE_SD))
            total += self.known[item]
        return total


def relative(effects: Effects, program: Program, to: Program) -> float:
    """How many times faster `program` is expected to be than `to`, a measured one of the same parts."""
    return math.exp(effects.of(program) - effects.of(to))
