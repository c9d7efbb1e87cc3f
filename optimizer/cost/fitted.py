"""The cost model: what an author expects, or a roofline prior for each kind of idea, within the machine's bound and corrected
by what was measured in this run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from optimizer.cost.roofline import Workload
from optimizer.records import MEASURED, Estimate, Experiment, Provenance

# which operators an idea of a focus can bring towards their floor
REACH: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "cache"),
    "cache": ("cache", "attention"),
    "projections": ("projections", "head", "pointwise"),
    "scheduling": (),
}
# share of the distance to the floor that a mechanism usually covers, before anything was measured
COVERS: Mapping[str, float] = {"python": 0.25, "compile": 0.35, "cpp": 0.6, "triton": 0.6, "settings": 0.0}
PRIOR_SD, NOISE_SD = 0.25, 0.12  # of log ratios
Z80 = 1.2816


@dataclass
class CostModel:
    """Predicts the speed-up over the baseline on the endpoint's traffic. `learn` from tier 1 or 2, most recent last."""

    work: Workload
    floors: Mapping[str, Mapping[str, float]]
    measured_ceilings: bool = True
    _surprises: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _foreseen: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))  # beside those

    def predict(
        self, artifact_hash: str, focus: str, mechanism: str, combines: bool = False, expected: float = 0.0
    ) -> Estimate:
        """`combines`: the candidate starts from another's source, so it may reach every operator. `expected`: what its
        author expects of it, 0 when not said; believed as far as such candidates kept what was expected of them.
        """
        bound = self.bound(tuple(self._all()))
        prior = self._prior(focus, mechanism, combines, expected)
        seen = self._surprises[focus, mechanism]
        precision = 1 / PRIOR_SD**2 + len(seen) / NOISE_SD**2
        mean = prior + sum(seen) / NOISE_SD**2 / precision
        spread = Z80 * math.sqrt(1 / precision + NOISE_SD**2)
        provenance = self._provenance(focus, mechanism, prior)
        low, mid, high = (min(math.exp(mean + d), bound) for d in (-spread, 0.0, spread))
        detail = {"bound": bound, "roofline": math.exp(prior), "seen": float(len(seen)), "expected": expected}
        return Estimate(artifact_hash, mid, low, high, provenance, detail)

    def learn(
        self, focus: str, mechanism: str, experiment: Experiment, combines: bool = False, expected: float = 0.0
    ) -> None:
        """What was measured, beside what had been foreseen without it."""
        if experiment.state in MEASURED and experiment.ratio and experiment.ratio > 0:
            prior = self._prior(focus, mechanism, combines, expected)
            self._surprises[focus, mechanism].append(math.log(experiment.ratio) - prior)
            self._foreseen[focus, mechanism].append(prior)

    def _provenance(self, focus: str, mechanism: str, prior: float) -> Provenance:
        """A correction stands on what was measured only where as much had been foreseen of something that was."""
        known = self._foreseen[focus, mechanism]
        if len(known) < 2:
            return Provenance.ROOFLINE if self.measured_ceilings else Provenance.UNVALIDATED
        inside = min(known) - NOISE_SD <= prior <= max(known) + NOISE_SD
        return Provenance.FITTED if inside else Provenance.EXTRAPOLATED

    def _prior(self, focus: str, mechanism: str, combines: bool, expected: float) -> float:
        """Log ratio foreseen before anything was measured: the author's, within the bound, or the mechanism's usual."""
        if expected > 0:
            return math.log(min(expected, self.bound(tuple(self._all()))))
        reach = tuple(self._all()) if combines or mechanism in ("cpp", "compile", "triton") else REACH.get(focus, ())
        return math.log(self.bound(reach, COVERS.get(mechanism, 0.25)))

    def bound(self, operators: tuple[str, ...], covers: float = 1.0) -> float:
        """The speed-up when `operators` cover that share of their distance to the floor."""
        before = self.work.request_s(self.work.step_s)
        saved = 0.0
        for phase, steps in self.work.weights().items():
            for op in operators:
                now = self.work.operators.get(phase, {}).get(op, 0.0)
                saved += steps * covers * max(0.0, now - self.floors[phase].get(op, 0.0))
        return before / max(before - saved, 0.05 * before)

    def _all(self) -> list[str]:
        return sorted({op for parts in self.work.operators.values() for op in parts})
