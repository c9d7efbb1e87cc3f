"""What a focus is worth at most, by Amdahl's law, and what a program's time goes to: both from the roofline's bounds.

The incumbent is timed as a whole, since its kernels do not stop where an operator ends. So its time is its measured speed's; of
that, what is above the machine's bound is shared out over the operators as the baseline's profile and the gains expected of
its parts say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from engine.models.config import ModelConfig
from kernels.precision import SAME
from optimizer.cost.fitted import REACH
from optimizer.cost.roofline import Bound, Ceilings, Workload, bounds

WAITS = 0.5  # of its time: a program that spends more above the machine's bound waits for calls and barriers
LEAST = 0.02  # of an operator's time stays above its bound, however much its parts promised
MOST_DRAFTS = 8  # guesses a step that agents propose at most
NOTHING = 0.02  # of the time is never saved: a bound is not zero


@dataclass(frozen=True)
class Roof:
    """`lowest` is the lowest precision that the run may compute in. Seconds are of one answered request."""

    config: ModelConfig
    dtype: str
    ceilings: Ceilings
    work: Workload
    lowest: str = SAME

    def worth(self, ratio: float, gains: Mapping[str, float], held: float = 1.0) -> dict[str, float]:
        """focus -> what it may add at most to the speed of a program that is `ratio` times the baseline's: 0.5 is 50%.

        `gains`: operator -> how many times faster the program's parts made it, as far as that is expected. `held`: the share of
        drafts that hold on this traffic, 1 where none were tried.
        """
        now = self.work.request_s(self.work.step_s) / ratio
        above = self.above(now, gains)
        saved = {focus: sum(s for (_, op), s in above.items() if op in operators) for focus, operators in REACH.items()}
        saved["scheduling"] = self._fewer_steps(now, above, held)
        return {focus: now / max(now - s, NOTHING * now) - 1.0 for focus, s in saved.items()}

    def above(self, now: float, gains: Mapping[str, float]) -> dict[tuple[str, str], float]:
        """(phase, operator) -> its seconds above the machine's bound, in a program that takes `now` for a request."""
        steps, weight = self.work.weights(), {}
        for phase, operators in self._least.items():
            profile = self.work.operators.get(phase) or dict.fromkeys(
                operators, self.work.step_s.get(phase, 0.0) / len(operators)
            )
            for op, bound in operators.items():
                took = profile.get(op, 0.0)
                left = max(took / gains.get(op, 1.0) - bound.seconds, LEAST * took)
                weight[phase, op] = steps[phase] * left
        total = sum(weight.values()) or 1.0
        excess = max(0.0, now - self._floor_s)
        return {key: excess * w / total for key, w in weight.items()}

    def bottleneck(self, precision: str, ratio: float) -> str:
        """`bytes`, `barrier` or `arithmetic`, of a program that computes in `precision` at `ratio` times the baseline's speed."""
        now = self.work.request_s(self.work.step_s) / ratio
        found, steps = bounds(self.config, self.dtype, self.ceilings, self.work, precision), self.work.weights()
        by_bytes = by_arithmetic = 0.0
        for phase, operators in found.items():
            for bound in operators.values():
                if bound.bytes_s >= bound.arithmetic_s:
                    by_bytes += steps[phase] * bound.bytes_s
                else:
                    by_arithmetic += steps[phase] * bound.arithmetic_s
        if now - by_bytes - by_arithmetic > WAITS * now:
            return "barrier"
        return "bytes" if by_bytes >= by_arithmetic else "arithmetic"

    def _fewer_steps(self, now: float, above: Mapping[tuple[str, str], float], held: float) -> float:
        """Seconds saved when every decode step makes the most tokens that drafts can, down to the arithmetic of them all."""
        steps = self.work.weights()["decode"]
        share = min(1.0, now / self._floor_s) if self._floor_s else 1.0
        floor = share * steps * sum(b.seconds for b in self._least["decode"].values())
        decode = floor + sum(s for (phase, _), s in above.items() if phase == "decode")
        arithmetic = share * steps * sum(b.arithmetic_s for b in self._least["decode"].values())
        return max(0.0, decode - max(decode / (1 + MOST_DRAFTS * held), arithmetic))

    @cached_property
    def _least(self) -> dict[str, dict[str, Bound]]:
        return bounds(self.config, self.dtype, self.ceilings, self.work, self.lowest)

    @property
    def _floor_s(self) -> float:
        steps = self.work.weights()
        return sum(steps[phase] * b.seconds for phase, found in self._least.items() for b in found.values())
