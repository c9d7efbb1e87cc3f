"""Where a search stands: the best program of each kind, and what each focus is still worth. Agents, queue and people read it."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

from optimizer.agents.base import Tried
from optimizer.agents.cells import composed, declared, traits
from optimizer.agents.memory import gains
from optimizer.bandit import Bandit
from optimizer.config import RunConfig
from optimizer.cost.roofline import Ceilings, lowest_allowed
from optimizer.cost.room import Roof
from optimizer.elites import Archive, Cell
from optimizer.ledger import Ledger
from optimizer.measuring import Measures
from optimizer.records import Candidate, Experiment, Proposal, State


class Standing:
    def __init__(self, config: RunConfig, lab: Measures, ledger: Ledger) -> None:
        self.config, self.lab, self.ledger = config, lab, ledger
        self.archive, self.bandit = Archive(), Bandit(config.seed)

    def learn(self, candidate: Candidate, experiment: Experiment) -> None:
        proposal = self.ledger.proposals[candidate.proposal_id]
        self.archive.told(candidate, experiment, lambda ratio: self.cell(proposal, ratio))
        self.bandit.told(candidate, experiment)

    def tell(self, incumbent: Tried | None) -> None:
        """Works out what each focus is worth beside this incumbent, and tells whoever watches."""
        self.bandit.ratio = (incumbent.experiment.ratio if incumbent else None) or 1.0
        self.bandit.room = self.roof.worth(self.bandit.ratio, _gains(incumbent), self._held())
        self.ledger.stands("foci", self._foci())
        self.ledger.stands("elites", [elite.to_json() for elite in self.archive.elites()])

    def cell(self, proposal: Proposal, ratio: float) -> Cell:
        precision, fusion, tile = traits(proposal)
        return Cell(precision, fusion, tile, self.roof.bottleneck(declared(proposal.precision), ratio))

    @cached_property
    def roof(self) -> Roof:
        scene, dtype = self.lab.scene, self.config.dtype
        lowest = lowest_allowed(dtype, self.config.tolerance)
        return Roof(scene.config, dtype, Ceilings.of(scene.machine.ceilings, dtype), self.lab.work, lowest)

    def _foci(self) -> list[dict[str, Any]]:
        """The bandit's rows, with what was proposed and what was surely faster on the whole model."""
        proposed = Counter(p.focus for p in self.ledger.proposals.values())
        sure = {e.artifact_hash for e in self.ledger.experiments.values() if e.tier >= 2 and e.state is State.KEEP}
        kept = Counter(self.ledger.candidates[digest].focus for digest in sure)
        return [row | {"proposals": proposed[row["focus"]], "kept": kept[row["focus"]]} for row in self.bandit.rows()]

    def _held(self) -> float:
        """The largest share of drafts that held where some were tried, 1 where none were."""
        found = [e.metrics["accepted_share"] for e in self.ledger.experiments.values() if "accepted_share" in e.metrics]
        return max(found, default=1.0)


def _gains(incumbent: Tried | None) -> dict[str, float]:
    """What the incumbent's parts are expected to have brought; nothing is known of another hand's."""
    program = composed(incumbent.candidate.name) if incumbent else None
    return gains(program) if program else {}
