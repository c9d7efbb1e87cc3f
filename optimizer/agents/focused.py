"""An agent with one focus: it tries its ideas, builds the best of all foci together, and tunes what has won.

Its proposals come from three streams, taken in turn: *explore* (an idea of its own that nobody tried), *combine* (the
best program found so far with its best idea put in) and *tune* (parameters and settings of the best program). When one
stream has nothing new, the next is taken. The order within a stream is by expected speed: shares of the baseline's
time, gains expected of the parts, and what was measured of them since.

What is said on the board changes that (`heard.py`): an answer puts its program before the streams, a value that won elsewhere
is where a program starts, and what failed or adds nothing is closed for all.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from engine.artifacts import source_hash
from engine.models.structure import baseline_of
from kernels import registry
from kernels.gpu.tunables import CAPABILITY
from kernels.precision import exact
from optimizer.agents.base import Desk, SearchView
from optimizer.agents.heard import Heard, Start
from optimizer.agents.memory import Memory
from optimizer.agents.programs.edit import Part, parts
from optimizer.agents.programs.program import Program
from optimizer.agents.voice import Voice
from optimizer.agents.words import figures
from optimizer.records import Candidate, Experiment, Post, Proposal

NEEDS_COMPILER = frozenset({"cpp", "compile"})
TURNS = ("explore", "explore", "combine", "explore", "tune")
STEPS, FARTHEST, BEAM = 2, 5, 4  # parameters changed of the best program, and from how many programs a step is taken
FRESH = 3  # every so many proposals that tune, one may need a compiler as well as not
WORTH_KEEPING = 1.01  # a part joins a combination when it is expected to bring at least this


class FocusAgent:
    """Base of the agents. A subclass names its focus and its ideas; `ideas` are lists of parts tried together."""

    name: str
    focus: str
    ideas: tuple[tuple[str, ...], ...]
    turns: tuple[str, ...] = TURNS

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.memory = seed, Memory()
        self.heard = Heard(self.name)
        self.voice = Voice(self.name, self.focus, self.ideas, self.heard)
        self._made: dict[str, str] = {}  # name -> source hash of what this agent proposed
        self._count = 0

    def sit(self, desk: Desk) -> None:
        self.voice.desk = desk

    def talk(self, view: SearchView) -> None:
        self.voice.talk(view)

    def propose(self, view: SearchView) -> Proposal | None:
        self.heard.read(view.posts)
        for start in self.heard.suggested():
            if proposal := self._new(start, view, same_source=False):
                self._count += 1
                return proposal
        first = self.turns[self._count % len(self.turns)]
        order = [first, *(s for s in ("explore", "combine", "tune") if s != first)]
        streams = {"explore": self.explore, "combine": self.combine, "tune": self.tune}
        for stream in order:
            for start in self._starts(streams[stream](view), tuning=stream == "tune"):
                proposal = self._new(start, view, same_source=stream == "tune")
                if proposal is not None:
                    self._count += 1
                    return proposal
        return None

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        self.memory.learn(candidate, experiment)
        self.voice.told(candidate, experiment)
        if candidate.agent == self.name and candidate.name not in self._made:  # proposed before a resume
            self._made[candidate.name] = candidate.source_hash
            self._count += 1

    def limits(self, view: SearchView) -> list[str]:
        meant = (p for idea in self.ideas for p in self._parts_of(idea) if all(view.config.get(f) for f in p.only))
        off = [part for part in meant if self._obstacle(part, view)]
        reasons: dict[str, list[str]] = {}
        for part in {p.name: p for p in off}.values():
            reasons.setdefault(self._obstacle(part, view), []).append(part.name)
        return [f"{self.name}: {', '.join(names)} cannot be tried, because {why}." for why, names in reasons.items()]

    # the three streams, best first

    def explore(self, view: SearchView) -> Iterator[Program]:
        """The agent's ideas, each by itself on the baseline."""
        yield from self._by_worth((p for idea in self.ideas for p in lower_precisions(Program.of(idea))), view)

    def combine(self, view: SearchView) -> Iterator[Program]:
        """The agent's ideas put into the best program that has room for them, with what others found."""
        union = self.union(view)
        bases = [union, self.memory.best(), self.memory.best(kernels=False)]
        programs = [union] if union.parts else []
        for idea in self.ideas:
            having_room = (b for b in bases if b.parts and b.fits(*idea) and not set(idea) <= set(b.parts))
            programs += [base.plus(*idea) for base in having_room]
        yield from self._by_worth(programs, view)

    def tune(self, view: SearchView) -> Iterator[Program]:
        """Programs near the best one in the order of a draw of what their values may bring, those that need no compiler
        first but every `FRESH`th time. What is more than `STEPS` changes away comes when nothing nearer is left.
        """
        best = self.memory.best()
        salt = "|".join((str(self.seed), self.name, best.name, str(len(self.memory.speeds))))
        drawn = self.memory.effects(best.parts).draw(np.random.default_rng(list(salt.encode())))
        built = {self._built(p) for p in self.memory.speeds} if self._count % FRESH else set()
        found: dict[Program, float] = {}
        edge = [best]
        for step in range(1, FARTHEST + 1):
            near = {n: drawn.of(n) for program in edge for n in self._neighbours(program)}
            edge = sorted(near, key=lambda p: (-near[p], p.name))[:BEAM]
            found |= near
            if step >= STEPS:
                yield from sorted(found, key=lambda p: (self._built(p) not in built, -found[p], p.name))

    def union(self, view: SearchView) -> Program:
        """Greedy crossover: of all parts tried by anyone, the ones worth most that fit together."""
        tried = {name for program in self.memory.speeds for name in program.parts if name not in self._whole()}
        usable = sorted(name for name in tried if not self._obstacle(parts()[name], view))
        program = Program()
        while True:
            options = [program.plus(n) for n in usable if n not in program.parts and program.fits(n)]
            here = self.memory.expect(program, view)
            best = max(options, key=lambda p: (self.memory.expect(p, view), p.name), default=program)
            if self.memory.expect(best, view) < here * WORTH_KEEPING:
                return program
            program = best

    # making proposals

    def _starts(self, programs: Iterable[Program], tuning: bool) -> Iterator[Start]:
        """The programs as the board has them begin, and each as it is; tuning changes one value of what was measured."""
        for program in programs:
            if tuning:
                yield Start(program)
            elif not self.heard.is_given_up(program):
                started = self.heard.started(program)
                yield from [started, Start(program)] if started.post else [started]

    def _new(self, start: Start, view: SearchView, *, same_source: bool) -> Proposal | None:
        """The program as a proposal, or None when it was proposed before, is closed or cannot run here."""
        program, post = start
        if program.name in self._made or program.name in view.proposed or program in self.memory.failed:
            return None
        if program in self.memory.speeds or not (program.parts or program.values):
            return None
        if any(self._obstacle(part, view) for part in program.chosen) or self.heard.is_closed(program):
            return None
        if not exact(program.precision) and view.tolerance != "quantised":
            return None
        files = program.files(baseline_of(view.config))
        source = source_hash(files, program.manifest_settings)
        if program.precision != "same":  # bits a weight are a constant of the source, and yet another idea
            source += f" in {program.precision}"
        if not same_source and (source in view.tried or source in self.memory.sources or source in self._made.values()):
            return None
        self._made[program.name] = source
        return Proposal(
            id=f"{self.name}-{hashlib.sha256(program.name.encode()).hexdigest()[:12]}",
            agent=self.name,
            focus=self.focus,
            name=program.name,
            hypothesis=(quoted(post) if post else "") + self.hypothesis(program, view),
            mechanism=program.mechanism,
            files=files,
            settings=program.manifest_settings,
            precision=program.precision,
            device=program.device,
            expected=self.memory.expect(program, view),
            parent=view.incumbent.artifact_hash if view.incumbent and self._derived(program, view) else "",
            because=post.id if post else "",
        )

    def hypothesis(self, program: Program, view: SearchView) -> str:
        """Why this program should be faster, with the figures that say so."""
        named = figures(view)
        mine = {n for idea in self.ideas for n in idea}
        chosen = sorted(program.chosen, key=lambda p: (p.name not in mine, -self._promise(p, view)))
        reasons = [part.why.format(**named) for part in chosen[:1]]
        if len(chosen) > 1:
            reasons.append(f"Together with {', '.join(p.name for p in chosen[1:])}.")
        reasons += [self.reason(k, v, program) for k, v in program.values]
        expected = self.memory.expect(program, view)
        return " ".join([*reasons, f"Expected {expected:.2f}x the baseline."])

    def reason(self, name: str, value: Any, program: Program) -> str:
        """Why this parameter or setting."""
        for op in program.operators:
            for parameter in op.params:
                if program.key(op, parameter.name) == name:
                    return f"{name} = {value} instead of {parameter.default}: {parameter.why}."
        return f"{name} = {value}."

    def _neighbours(self, program: Program) -> list[Program]:
        changed = []
        for op in program.operators:
            here = program.values_of(op)
            now = op.resolve(here)
            for parameter in op.params:
                for value in parameter.values:
                    if value != now[parameter.name] and op.allows({**here, parameter.name: value}):
                        changed.append(program.plus(**{program.key(op, parameter.name): value}))
        return changed

    @staticmethod
    def _built(program: Program) -> tuple[object, ...]:
        """What a compiler makes: equal for programs that differ in values read at run time alone."""
        late = {p.name for op in program.operators for p in op.params if p.late}
        return program.parts, tuple(v for v in program.values if v[0] not in late)

    def _by_worth(self, programs: Iterable[Program], view: SearchView) -> list[Program]:
        """Without repeats, best expected speed first."""
        return sorted(dict.fromkeys(programs), key=lambda p: (-self.memory.expect(p, view), p.name))

    def _shuffled(self, programs: list[Program], *salt: str) -> list[Program]:
        """In an order that depends on the seed and `salt` alone."""
        rng = random.Random("|".join((str(self.seed), self.name, *salt)))
        ordered = sorted(dict.fromkeys(programs), key=lambda p: p.name)
        rng.shuffle(ordered)
        return ordered

    def _promise(self, part: Part, view: SearchView) -> float:
        return self.memory.expect(Program.of([part.name]), view)

    def _derived(self, program: Program, view: SearchView) -> bool:
        parent = set(view.incumbent.name.partition(" (")[0].split(" + ")) if view.incumbent else set()
        return bool(parent & set(program.parts))

    def _parts_of(self, idea: Iterable[str]) -> list[Part]:
        return Program.of(idea).chosen

    @staticmethod
    def _whole() -> set[str]:
        """Parts that leave no room for others."""
        return {name for name, part in parts().items() if any(not hunk.old for hunk in part.hunks)}

    @staticmethod
    def _obstacle(part: Part, view: SearchView) -> str:
        """Why the part cannot run on this machine or model, or ""."""
        gpu, least = view.machine.gpu, CAPABILITY["same"]
        if part.device == "cuda" and gpu is None:
            return "there is no NVIDIA GPU"
        if part.device == "cuda" and gpu is not None and gpu.capability < least:
            return f"they need compute capability {least[0]}.{least[1]} and there is {gpu}"
        if part.mechanism in NEEDS_COMPILER and not view.machine.has_compiler:
            return "there is no C++ compiler (install g++ or set CXX)"
        if part.dtypes and view.dtype not in part.dtypes:
            return f"they work in {' or '.join(sorted(part.dtypes))} and the endpoint is served in {view.dtype}"
        own = baseline_of(view.config)
        if own not in part.baselines:
            return f"they are not made for the baseline of a {view.config.get('model_type')} model ({own})"
        missing = [field for field in sorted(part.only) if not view.config.get(field)]
        if missing:
            return f"they are for models with {', '.join(missing)}"
        wrong = [field for field in sorted(part.unless) if view.config.get(field)]
        if wrong:
            return f"they do not serve models with {', '.join(wrong)}"
        if part.kernel and int(view.config.get("head_dim", 16)) % 16:
            return "the kernels need a head size that is a multiple of 16"
        return ""


def quoted(post: Post) -> str:
    return f"{post.agent} said: {post.text} "


def lower_precisions(program: Program) -> list[Program]:
    """The program, and itself with weights or cache in each other precision that its kernels have."""
    lower = [
        program.plus(**{parameter.name: value})
        for kernel in program.kernels
        for parameter in registry.load(kernel).params
        for value, _ in parameter.precision
    ]
    return [program, *lower]
