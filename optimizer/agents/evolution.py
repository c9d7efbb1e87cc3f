"""Evolution: children of the best program of each kind, so that what is stuck at one optimum is left by way of another.

MAP-Elites (`optimizer/elites.py`): parents are drawn from the cells, each alike likely, and not from the best alone. A child is
one parent with some declared parameters changed, or two parents of different cells put together, parts and values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.scheduler import SchedulerConfig
from optimizer.agents.base import SearchView
from optimizer.agents.cells import composed
from optimizer.agents.focused import FocusAgent
from optimizer.agents.programs.edit import parts
from optimizer.agents.programs.program import Program
from optimizer.elites import Elite
from optimizer.records import Proposal

TRIES = 60  # children that may turn out to be known, before there is nothing to say
CROSSES = 0.5  # of the children have two parents, where there are two cells
AGAIN = 0.5  # chance of one more parameter to change, each time
MOST_CHANGES = 4
CONCERNS = {  # what values are about that are not their kernel's focus
    **dict.fromkeys(("PM_KV_BITS", "PM_KV_PREFETCH", "block_size", "layers_apart"), "cache"),
    **dict.fromkeys(("PM_SPAN", "PM_ATTENTION_ROWS"), "attention"),
    **dict.fromkeys(SchedulerConfig.__slots__, "scheduling"),
}


@dataclass(frozen=True, slots=True)
class Parent:
    elite: Elite
    program: Program


@dataclass(frozen=True, slots=True)
class Birth:
    first: Parent
    second: Parent | None  # of another cell; None: the first one's values were changed

    @property
    def words(self) -> str:
        named = [
            f"{p.program.name} ({p.elite.ratio:.2f}x; {p.elite.cell.name})" for p in (self.first, self.second) if p
        ]
        return f"A cross of {' and '.join(named)}." if self.second else f"A mutation of {named[0]}."


class EvolutionAgent(FocusAgent):
    """Its proposals count to the focus of what they change."""

    name = "evolution"
    focus = ""
    ideas = ()
    turns = ("tune",)

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._births: dict[str, Birth] = {}  # by the child's name

    def propose(self, view: SearchView) -> Proposal | None:
        proposal = super().propose(view)
        birth = self._births.get(proposal.name) if proposal else None
        if proposal is None or birth is None:
            return proposal
        focus = concern(Program.parse(proposal.name), birth.first.program)
        return replace(proposal, focus=focus, parent=birth.first.elite.artifact_hash)

    def explore(self, view: SearchView) -> Iterator[Program]:
        yield from ()

    def combine(self, view: SearchView) -> Iterator[Program]:
        yield from ()

    def tune(self, view: SearchView) -> Iterator[Program]:
        """Children that satisfy every constraint, in an order that depends on the seed, the cells and what was made before."""
        parents = self._parents(view)
        for turn in range(TRIES if parents else 0):
            rng = random.Random(f"{self.seed} {self.name} {self._count} {turn}")
            birth = drawn(parents, rng)
            child = mutated(birth.first.program, rng)
            if birth.second:
                child = crossed(birth.first.program, birth.second.program, rng)
            if child is not None:
                self._births.setdefault(child.name, birth)
                yield child

    def hypothesis(self, program: Program, view: SearchView) -> str:
        birth = self._births.get(program.name)
        if birth is None:
            return super().hypothesis(program, view)
        changed = dict(program.values).items() - dict(birth.first.program.values).items()
        reasons = [self.reason(name, value, program) for name, value in sorted(changed)]
        return " ".join([birth.words, *reasons, f"Expected {self.memory.expect(program, view):.2f}x the baseline."])

    def _parents(self, view: SearchView) -> list[Parent]:
        """Elites whose parts are known and can run here."""
        found = []
        for elite in view.elites:
            program = composed(elite.name)
            if (
                program
                and program not in self.memory.failed
                and not any(self._obstacle(p, view) for p in program.chosen)
            ):
                found.append(Parent(elite, program))
        return found


def drawn(parents: Sequence[Parent], rng: random.Random) -> Birth:
    """One parent, or two of different cells that compute on the same device."""
    first = rng.choice(parents)
    others = [p for p in parents if p.elite.cell != first.elite.cell and p.program.device == first.program.device]
    return Birth(first, rng.choice(others) if others and rng.random() < CROSSES else None)


def mutated(program: Program, rng: random.Random) -> Program | None:
    """The program with one to MOST_CHANGES parameters at other values of theirs; None when that is not allowed."""
    choices = [(op, parameter) for op in program.operators for parameter in op.params]
    if not choices:
        return None
    changes: dict[str, Any] = {}
    while not changes or (len(changes) < MOST_CHANGES and rng.random() < AGAIN):
        op, parameter = rng.choice(choices)
        now = program.values_of(op).get(parameter.name, parameter.default)
        changes[program.key(op, parameter.name)] = rng.choice([v for v in parameter.values if v != now])
    child = settled(program.plus(**changes))
    return child if child and child != settled(program) else None


def crossed(one: Program, other: Program, rng: random.Random) -> Program | None:
    """Parts of both in a drawn order, as far as they fit together, and of each value one parent's; None for either again."""
    names = [*one.parts, *(n for n in other.parts if n not in one.parts)]
    rng.shuffle(names)
    child = Program()
    for name in names:
        if child.fits(name):
            child = child.plus(name)
    values = [dict(p.values) for p in (one, other)]
    chosen: dict[str, Any] = {}
    for key in sorted({*values[0], *values[1]}):
        from_one = values[rng.randrange(2)]
        if key in from_one:
            chosen[key] = from_one[key]
    made = settled(child.plus(**chosen))
    return made if made and made not in (settled(one), settled(other)) else None


def settled(program: Program) -> Program | None:
    """The program without values that say nothing: defaults, and parameters that none of its kernels has. None for one that
    some kernel does not allow.
    """
    defaults: dict[str, list[int]] = {}
    for op in program.operators:
        for p in op.params:
            defaults.setdefault(program.key(op, p.name), []).append(p.default)
    says = {k: v for k, v in program.settings.items() if k != "layers_apart" or "whole_step" in program.parts}
    says |= {k: v for k, v in program.parameters.items() if k in defaults and any(d != v for d in defaults[k])}
    made = Program.of(program.parts, **says)
    span = made.parameters.get("PM_SPAN", 256)
    allowed = all(op.allows(made.values_of(op)) for op in made.operators)
    return made if allowed and span % int(made.settings.get("block_size", 1)) == 0 else None


def concern(child: Program, parent: Program) -> str:
    """The focus that the child's difference from its first parent is about."""
    for name in child.parts:
        if name not in parent.parts:
            return parts()[name].focus
    changed = sorted(k for k in {**dict(child.values), **dict(parent.values)} if _value(child, k) != _value(parent, k))
    kernel = next((p.focus for p in child.chosen if p.kernel or p.device == "cuda"), "projections")
    return CONCERNS.get(changed[0], kernel) if changed else kernel


def _value(program: Program, key: str) -> Any:
    return dict(program.values).get(key)
