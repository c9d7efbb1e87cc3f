"""What the loop needs of whatever measures: the lab with its engine hosts, or a recorded landscape that answers from a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.artifacts import Artifact, ArtifactStore
from optimizer.cost.fitted import CostModel
from optimizer.cost.roofline import Workload
from optimizer.measure.tiers import Measured


class Measures(Protocol):
    baseline: Artifact
    artifacts: ArtifactStore
    work: Workload
    cost: CostModel

    @property
    def scene(self) -> Any:
        """Has `config` (a dataclass) and `machine` (`optimizer.agents.base.Machine`)."""
        ...

    def shares(self) -> dict[str, dict[str, float]]: ...

    def tier_one(
        self,
        artifact: Artifact,
        incumbent: Artifact | None,
        timeout_s: float,
        earlier: Sequence[float] = (),
        judge: Callable[[str], None] = lambda behaviour: None,
    ) -> Measured: ...

    def tier_two(self, artifact: Artifact, incumbent: Artifact | None) -> Measured: ...

    def keep(self, *hashes: str) -> None: ...
