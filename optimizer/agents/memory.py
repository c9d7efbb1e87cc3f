"""What an agent knows of programs: measured speeds, and from them what a program not yet tried may bring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernels.precision import of_cache, of_weights
from optimizer.agents.base import OPERATORS, SearchView
from optimizer.agents.effects import Effects, relative
from optimizer.agents.programs.edit import parts
from optimizer.agents.programs.program import Program, ProgramError
from optimizer.records import MEASURED, Candidate, Experiment, State

# what fewer bits are expected to give to what reads the weights, or the cache: less than the bytes saved, as inputs are quantised too
PRECISION_GAIN = {"same": 1.0, "coded": 1.0, "fp8": 1.6, "int8": 1.6, "int4": 2.4, "kv-int8": 1.5}
KEEP = 0.5  # of the surprise of a program falls to each part that is new in it


@dataclass
class Memory:
    """Speeds over the baseline by program. A higher tier replaces a lower one; the same result twice counts once."""

    speeds: dict[Program, float] = field(default_factory=dict)
    tiers: dict[Program, int] = field(default_factory=dict)
    leader: Program | None = None  # the last that was confirmed as the fastest
    failed: set[Program] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)

    def learn(self, candidate: Candidate, experiment: Experiment) -> None:
        self.sources.add(candidate.source_hash)
        try:
            program = Program.parse(candidate.name)
        except ProgramError:
            return  # another hand's program: its source is known, its parts are not
        if experiment.leads:
            self.leader = program
        if experiment.state is State.FAILED:
            self.failed.add(program)
        elif experiment.state in MEASURED and experiment.ratio and experiment.tier >= self.tiers.get(program, 0):
            self.speeds[program], self.tiers[program] = experiment.ratio, experiment.tier

    def best(self, kernels: bool | None = None) -> Program:
        """The program confirmed as the fastest, else the fastest that did not fail, the baseline when none is faster: of many
        that were measured with noise the fastest seems faster than it is. `kernels`: only with, or without.
        """
        led = self.leader
        if led and led not in self.failed and (kernels is None or bool(led.operators) == kernels):
            return led
        found = [
            (speed, program.name, program)
            for program, speed in self.speeds.items()
            if program not in self.failed and (kernels is None or bool(program.operators) == kernels)
        ]
        speed, _, program = max(found, default=(1.0, "", Program()))
        return program if speed > 1.0 else Program()

    def speed(self, program: Program) -> float:
        return self.speeds.get(program, 1.0)

    def expect(self, program: Program, view: SearchView) -> float:
        """Speed over the baseline: from a measured program that it contains, by what is known of the parts it adds."""
        if program in self.speeds:
            return self.speeds[program]
        known = [p for p in self.speeds if _within(p, program) and p not in self.failed]
        base = max(known, key=lambda p: (len(p.parts), p == self.leader, self.speeds[p], p.name), default=Program())
        ratio = amdahl(program, view) / amdahl(base, view)
        if program.parts == base.parts:
            ratio *= relative(self.effects(program.parts), program, base)
        for name in set(program.parts) - set(base.parts):
            ratio *= self.surprise(name, view)
        for name, value in program.settings.items() - base.settings.items():
            ratio *= self.setting(name, value)
        return self.speed(base) * ratio

    def effects(self, parts: tuple[str, ...]) -> Effects:
        """What the parameters' values bring in programs of these parts."""
        alike = {p: speed for p, speed in self.speeds.items() if p.parts == parts and p not in self.failed}
        return Effects(alike, self.tiers)

    def surprise(self, name: str, view: SearchView) -> float:
        """How far the part did better than expected where it was tried beside the same settings, 1 when it was not."""
        factor = 1.0
        for program in self.speeds:
            if name not in program.parts:
                continue
            rest = Program.of(p for p in program.parts if p != name and name not in parts()[p].needs)
            rest = rest.plus(**program.settings)  # what a setting brought is no part's merit
            if rest in self.speeds or rest == Program():
                expected = self.speed(rest) * amdahl(program, view) / amdahl(rest, view)
                factor = (self.speeds[program] / expected) ** KEEP
        return factor

    def setting(self, name: str, value: Any) -> float:
        """What the setting brought where it was tried, 1 when it was not."""
        factor = 1.0
        for program in self.speeds:
            if program.settings.get(name) != value:
                continue
            rest = Program(program.parts, tuple(v for v in program.values if v[0] != name))
            if rest in self.speeds or rest == Program():
                factor = (self.speeds[program] / self.speed(rest)) ** KEEP
        return factor


def _within(small: Program, large: Program) -> bool:
    """Whether `large` has all parts and settings of `small`; kernel parameters are left aside."""
    return set(small.parts) <= set(large.parts) and small.settings.items() <= large.settings.items()


def gains(program: Program) -> dict[str, float]:
    """operator -> how many times faster its parts and precision are expected to make it."""
    weights, cache = (PRECISION_GAIN[part(program.precision)] for part in (of_weights, of_cache))
    found = {"projections": weights, "head": weights, "attention": cache}
    for part in program.chosen:
        for operator, gain in part.gains.items():
            found[operator] = found.get(operator, 1.0) * gain
    return found


def amdahl(program: Program, view: SearchView) -> float:
    """The speed over the baseline that the parts' own gains promise, by each operator's share of its time."""
    gain = gains(program)
    left = sum(view.share(operator) / gain.get(operator, 1.0) for operator in OPERATORS)
    rest = max(0.0, 1.0 - sum(view.share(operator) for operator in OPERATORS))
    return 1.0 / max(left + rest, 1e-3)
