"""A lab that answers from the record: what a program takes moves a virtual clock, what it shows is the recorded mean with
noise drawn from the recorded pairs. And a workshop that compiles on that clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.artifacts import Artifact, ArtifactStore
from engine.models.config import ModelConfig
from optimizer.agents.base import Machine
from optimizer.agents.programs.program import Program
from optimizer.ahead import AHEAD, compiles
from optimizer.builder import Builder, Built, describe
from optimizer.cost.fitted import CostModel
from optimizer.cost.roofline import Workload
from optimizer.lab import LOOKS, VISITS
from optimizer.measure.probe import shares
from optimizer.measure.stats import Spread, paired_ratio
from optimizer.measure.tiers import Measured, Rule, WrongValues
from optimizer.records import Proposal
from tests.landscape import space
from tests.landscape.clock import Clock
from tests.landscape.table import Landscape, Row

TRACED = 0.5  # of a candidate's loading at tier 1 comes before its behaviour is known
BESIDE = 0.5  # of a core is left to a niced compiler while the engine loads and checks


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a search knows of model and machine."""

    config: ModelConfig
    machine: Machine


class TableLab:
    def __init__(
        self, land: Landscape, config: ModelConfig, artifacts: ArtifactStore, clock: Clock, seed: int = 0
    ) -> None:
        self.land, self.artifacts, self.clock, self.seed = land, artifacts, clock, seed
        about = land.about
        self.scene = Recorded(config, Machine(about["threads"], (), about["ceilings"], has_compiler=True))
        self.baseline = artifacts.baseline(config)
        self.work = Workload(**about["work"])
        self.cost = CostModel(self.work, about["floors"])
        spread = Spread(**about["spread"])
        self.first = Rule(about["noise"], LOOKS, 4.0, width=0.15, visits=VISITS, prior=spread)
        self.second = Rule(about["noise"], limit_s=9.0, width=0.03)
        self.visits: Counter[tuple[str, int]] = Counter()

    def shares(self) -> dict[str, dict[str, float]]:
        return shares(self.work.operators)

    def keep(self, *hashes: str) -> None: ...

    def tier_one(
        self,
        artifact: Artifact,
        incumbent: Artifact | None,
        timeout_s: float,
        earlier: Sequence[float] = (),
        judge: Callable[[str], None] = lambda behaviour: None,
    ) -> Measured:
        """Raises NotRecorded, WrongValues for what failed when it was recorded, and what `judge` raises."""
        row, rival = self.row(artifact), self.row(incumbent or self.baseline)
        self.clock.advance(TRACED * row.load_s)
        judge(row.behaviour)
        self.clock.advance((1 - TRACED) * row.load_s)
        _passed(row)
        noise, ratio = self.noise(row, 1), self.land.speed(row.name, 1) / self.land.speed(rival.name, 1)
        pair_s, start = self.pair_s(row, rival), self.clock()
        rows, before = list(earlier), len(earlier)
        while not self.first.enough(rows, self.clock() - start, before):
            rows.append(ratio * noise())
            self.clock.advance(pair_s, timed=True)
        prior = self.first.prior
        assert prior is not None
        prior.learn(rows[before:])
        state, against = self.first.state(rows), (incumbent or self.baseline).hash
        device_s = self.clock() - start
        return Measured(
            paired_ratio(rows, prior=prior), state, device_s, row.load_s, against=against, behaviour=row.behaviour
        )

    def tier_two(self, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        """Rounds of baseline, incumbent and challenger, as `TierTwo` takes them. Raises as `tier_one` does."""
        start, row = self.clock(), self.row(artifact)
        _passed(row)
        rival = self.row(incumbent) if incumbent else None
        sides = [self.row(self.baseline), *([rival] if rival else []), row]
        self.clock.advance(row.open_s or self.row(self.baseline).open_s)
        noises, begun = [self.noise(side, 2) for side in sides], self.clock()
        turns = [sides[0].turn_s / self.land.speed(side.name, 2) for side in sides]
        rows: list[list[float]] = []
        while not self.second.enough([r[-2] / r[-1] for r in rows], self.clock() - begun):
            rows.append([turn * noise() for turn, noise in zip(turns, noises, strict=True)])
            self.clock.advance(sum(rows[-1]), timed=True)
        ratios, over = [r[0] / r[-1] for r in rows], [r[1] / r[-1] for r in rows] if rival else []
        return Measured(
            paired_ratio(ratios),
            self.second.state(ratios),
            self.clock() - start,
            over_incumbent=paired_ratio(over) if over else None,
            against=self.baseline.hash,
            beats=self.second.state(over) if over else None,
        )

    def row(self, artifact: Artifact) -> Row:
        """Raises NotRecorded."""
        return self.land.row(self.land.baseline if artifact.hash == self.baseline.hash else artifact.manifest.name)

    def pair_s(self, row: Row, rival: Row) -> float:
        """Of a pair with `rival`: the recorded one was with the reference."""
        own, other = (1 / self.land.speed(r.name, 1) for r in (row, rival))
        return row.pair_s * (own + other) / (own + 1 / self.land.speed(self.land.reference, 1))

    def noise(self, row: Row, tier: int) -> Callable[[], float]:
        """Draws factors around 1 from the recorded pairs: the same ones for the same seed, program, tier and visit."""
        self.visits[row.name, tier] += 1
        rng = random.Random(f"{self.seed} {row.name} {tier} {self.visits[row.name, tier]}")
        side = math.sqrt(0.5) if tier == 2 else 1.0  # a ratio is of two sides, and tier 2 times each
        return lambda: math.exp(side * rng.choice(self.land.scatter[tier]))


def _passed(row: Row) -> None:
    if row.failure:
        raise WrongValues(row.failure)


class TableBuilder(Builder):
    """Makes artefacts without a compiler: the record says what one takes."""

    def build(self, proposal: Proposal, run: object = None) -> Built:
        artifact = self.store(proposal)
        return Built(describe(proposal, artifact, 0.0), artifact, kind="cpp_fresh" if compiles(proposal) else "python")


class TableWorkshop:
    """Stands in for `Workshop`: compiles what is wanted while the clock moves and nothing is timed."""

    def __init__(self, build: Callable[[Proposal], Built], land: Landscape, clock: Clock) -> None:
        self.build, self.land, self.clock = build, land, clock
        self.wanted: list[Proposal] = []
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds by unit
        clock.on_move.append(lambda seconds: self.work(BESIDE * seconds))

    def __enter__(self) -> TableWorkshop:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def want(self, proposals: Sequence[Proposal]) -> None:
        self.wanted = [p for p in proposals if compiles(p)][:AHEAD]

    def ready(self, proposal: Proposal) -> bool:
        return self.left(proposal) <= 0.0

    def take(self, proposal: Proposal) -> Built:
        self.wanted = [p for p in self.wanted if p.id != proposal.id]
        left, self.wanted, held = self.left(proposal), [], self.wanted  # the one compiler works on this alone
        self.clock.advance(left)
        self.spend(proposal, left)
        self.wanted = held
        return self.build(proposal)

    def work(self, seconds: float) -> None:
        for proposal in self.wanted:
            seconds -= self.spend(proposal, seconds)

    def left(self, proposal: Proposal) -> float:
        return sum(cost - self.spent[unit] for unit, cost in self.costs(proposal).items())

    def costs(self, proposal: Proposal) -> dict[str, float]:
        """Seconds of each unit, and of linking the library with its values read at run time."""
        if not compiles(proposal):
            return {}
        program = Program.parse(proposal.name)
        return {u: self.land.builds[u] for u in space.units(program)} | {proposal.name: self.land.link_s}

    def spend(self, proposal: Proposal, seconds: float) -> float:
        """The seconds used, at most those given."""
        used = 0.0
        for unit, cost in self.costs(proposal).items():
            now = min(cost - self.spent[unit], seconds - used)
            if now > 0:
                self.spent[unit] = cost if now == cost - self.spent[unit] else self.spent[unit] + now
                used += now
        return used
