"""Who is next: the focus whose next proposal may bring most, discounted by how its proposals fared lately.

Discounted Thompson sampling (Raj and Kalyani, "Taming non-stationary bandits: a Bayesian approach", 2017, arXiv:1707.09727):
the chance that a focus's proposal pays is a Beta of what came of its earlier ones, each counting less with every result since.
A draw of that chance times what the proposal may bring at most decides; most is the Amdahl bound of its focus
(`optimizer/cost/room.py`). A focus that was left alone forgets its failures, and is tried again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.records import Candidate, Experiment, State

FORGETS = 0.93  # what a result still counts when the next one is told: about fourteen of them are remembered
DRAWS = 200  # for the chances that are shown
LEAST = 0.001  # of room: the bound is measured too


@dataclass
class Bandit:
    """Depends on the seed and on what it was told alone, in the order of the candidates' first results."""

    seed: int = 0
    room: Mapping[str, float] = field(default_factory=dict)  # focus -> worth at most: 0.5 is 50%
    ratio: float = 1.0  # of the best program over the baseline
    odds: dict[str, float] = field(default_factory=dict)  # focus -> chance of the turn, at the latest choice
    _outcomes: dict[str, tuple[str, bool]] = field(default_factory=dict)  # artefact hash -> focus, whether it paid

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        """The same candidate at another tier or visit changes its outcome, not its place."""
        self._outcomes[candidate.artifact_hash] = (candidate.focus, paid(experiment))

    def choose(self, promise: Mapping[str, float]) -> str:
        """One of the foci in `promise`: focus -> the highest speed over the baseline that what waits of it may have."""
        most = {focus: self.most(focus, promise[focus]) for focus in sorted(promise)}
        chances = {focus: self.chances(focus) for focus in most}
        rng = random.Random(f"{self.seed} turn {len(self._outcomes)}")
        won = dict.fromkeys(most, 0)
        for _ in range(DRAWS):
            drawn = {focus: rng.betavariate(*chances[focus]) * most[focus] for focus in most}
            won[max(drawn, key=lambda focus: drawn[focus])] += 1
        self.odds = {focus: n / DRAWS for focus, n in won.items()}
        return rng.choices(list(won), weights=list(won.values()))[0]

    def most(self, focus: str, high: float) -> float:
        """What a proposal may bring at most, on the log scale: no more than its focus has room for. `high`: over the baseline."""
        return math.log1p(max(LEAST, min(self.room.get(focus, math.inf), high / self.ratio - 1.0)))

    def expects(self, focus: str, high: float) -> float:
        """The same, times the chance that such a proposal pays."""
        good, bad = self.chances(focus)
        return good / (good + bad) * self.most(focus, high)

    def chances(self, focus: str) -> tuple[float, float]:
        """Parameters of the Beta: paid and failed lately, one of each before anything is known."""
        good = bad = 1.0
        for age, (whose, pays) in enumerate(reversed(self._outcomes.values())):
            if whose == focus:
                good, bad = good + pays * FORGETS**age, bad + (not pays) * FORGETS**age
        return good, bad

    def rows(self) -> list[dict[str, Any]]:
        """What is shown of it, most room first."""
        return [self._row(focus) for focus in sorted(self.room, key=lambda f: (-self.room[f], f))]

    def _row(self, focus: str) -> dict[str, Any]:
        good, bad = self.chances(focus)
        told = [pays for whose, pays in self._outcomes.values() if whose == focus]
        recent = told[-10:]
        why = f"{sum(recent)} of its last {len(recent)} paid off" if recent else "not tried yet"
        if focus not in self.odds:
            why += "; it has nothing waiting"
        return {
            "focus": focus,
            "worth": round(self.room[focus], 4),
            "pays": round(good / (good + bad), 3),
            "turn": round(self.odds.get(focus, 0.0), 3),
            "why": why,
        }


def paid(experiment: Experiment) -> bool:
    """Whether it made the best program faster: it became the incumbent, or tier 1 says so and time was up."""
    return experiment.leads or (experiment.tier == 1 and experiment.state in (State.KEEP, State.MARGINAL))
