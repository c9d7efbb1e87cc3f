"""Agents that propose what they were given, and small traffic for the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.artifacts import BASELINE_FOLDER
from kernels.ceilings import cached_ceilings
from optimizer.agents.base import SearchView
from optimizer.config import RunConfig
from optimizer.lab import Scene
from optimizer.records import Candidate, Experiment, Proposal
from optimizer.traffic.profile import TrafficProfile
from tests.paths import test_data

BASELINE = (BASELINE_FOLDER / "forward.py").read_text()
SMALL = TrafficProfile("small", isl=(8, 8, 10, 12, 16, 20, 24, 24), osl=(6, 6, 8, 8, 8, 10, 12, 12), concurrency=2)

# every step is computed four times over
SLOW = """

class Slow(Forward):
    def __call__(self, batch, kv):
        for _ in range(3):
            super().__call__(batch, kv)
        return super().__call__(batch, kv)


def build(model, settings):
    return Slow(model, settings)
"""


def behind(name: str, body: str) -> str:
    """The baseline's source with a subclass behind it whose `__call__` has this body."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return (
        f"{BASELINE}\n\nclass {name}(Forward):\n    def __call__(self, batch, kv):\n{lines}\n"
        f"\n\ndef build(model, settings):\n    return {name}(model, settings)\n"
    )


def proposal(name: str, files: dict[str, str], focus: str = "attention", mechanism: str = "python") -> Proposal:
    return Proposal(f"p-{name}", f"agent of {name}", focus, name, f"{name} is tried", mechanism, files)


@dataclass
class Scripted:
    """Proposes its proposals in order, each once."""

    proposals: Sequence[Proposal]
    name: str = "scripted"
    focus: str = "attention"
    heard: list[tuple[str, Experiment]] = field(default_factory=list)

    def propose(self, view: SearchView) -> Proposal | None:
        return next((p for p in self.proposals if p.name not in view.proposed), None)

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        self.heard.append((candidate.name, experiment))

    def limits(self, view: SearchView) -> list[str]:
        return []


def agent_of(*given: Proposal) -> Scripted:
    return Scripted(given, name=given[0].agent, focus=given[0].focus)


def data_folder(folder: Path, threads: int = 1) -> Path:
    """A data folder that already holds this machine's ceilings: measured once and kept between test runs."""
    folder.mkdir(parents=True, exist_ok=True)
    cached_ceilings(test_data(), threads)
    (folder / "ceilings.json").write_bytes((test_data() / "ceilings.json").read_bytes())
    return folder


def scene_of(model: Path, folder: Path) -> Scene:
    """The tiny model, this machine and the small traffic."""
    return Scene.of(RunConfig(str(model), SMALL.to_json(), str(data_folder(folder)), dtype="float32", threads=1))
