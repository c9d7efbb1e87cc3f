"""What an agent is and what it sees. An agent writes programs for one focus; the search measures them and tells all.

Agents hold no clock, no files and no torch. What they propose depends on the view, on what they were told and on the
seed alone, so that a run can be repeated, and a resumed run (told everything again) goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kernels.hardware import Gpu
from optimizer.elites import Elite
from optimizer.records import Candidate, Experiment, Post, Proposal

OPERATORS = ("projections", "head", "attention", "cache", "pointwise")
# Shares of a plain PyTorch step on a CPU, used for an operator that the profile does not name.
TYPICAL: Mapping[str, Mapping[str, float]] = {
    "decode": {"projections": 0.56, "head": 0.08, "attention": 0.08, "cache": 0.15, "pointwise": 0.13},
    "prefill": {"projections": 0.68, "head": 0.03, "attention": 0.14, "cache": 0.03, "pointwise": 0.12},
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The device as agents know it. `ceilings` are what was measured on it: `read_gbs`, `gemm_bf16_flops` and so on."""

    threads: int = 1
    features: tuple[str, ...] = ()
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    has_compiler: bool = False
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    candidate: Candidate
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class SearchView:
    """The search at one moment. Times in seconds; shares add up to 1 within a phase."""

    config: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelConfig
    dtype: str = "bfloat16"  # what the endpoint is served in
    tolerance: str = "near"  # a lower precision may be proposed only when this is `quantised`
    machine: Machine = field(default_factory=Machine)
    profile: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # phase -> operator -> share of a step
    step_s: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds of the baseline's step
    prefill_share: float = 0.1  # of the baseline's time on this traffic
    concurrency: int = 4
    posts: tuple[Post, ...] = ()
    incumbent: Candidate | None = None
    incumbent_files: Mapping[str, str] = field(default_factory=dict)
    best: Mapping[str, Tried] = field(default_factory=dict)  # by focus
    experiments: tuple[Tried, ...] = ()
    tried: frozenset[str] = frozenset()  # source hashes
    elites: tuple[Elite, ...] = ()  # the best program of each cell
    proposed: frozenset[str] = frozenset()  # names of all proposals of this run, whoever made them
    seed: int = 0

    def share(self, operator: str, phase: str | None = None) -> float:
        """The operator's share of the baseline's time in `phase`, or on the traffic as a whole."""
        if phase is None:
            p = self.prefill_share
            return p * self.share(operator, "prefill") + (1 - p) * self.share(operator, "decode")
        return self.profile.get(phase, {}).get(operator, TYPICAL[phase][operator])


@dataclass(frozen=True, slots=True)
class Desk:
    """What a search lends an agent: a voice, a place to book what it uses elsewhere, and word of the end."""

    post: Callable[..., object] = lambda agent, kind, text, *more, **named: None  # as Board.post
    log: Callable[[str, str], None] = lambda text, level: None
    usage: Callable[[dict[str, Any]], None] = lambda totals: (
        None
    )  # tokens and money of one agent, all attempts together
    used: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # agent -> what earlier attempts booked
    stopped: Callable[[], bool] = lambda: False  # the search is over, or was asked to stop


class Agent(Protocol):
    """An agent that takes long (one that asks a language model) has an attribute `thinks = True`: it is then asked in a thread
    of its own, with a view of the moment when it began, and told results between its thoughts, in that same thread.

    One that has a method `talk(view)` is given the floor after each result: it may read the board, answer and ask. One that has
    a method `sit(desk)` is given the search's desk before the first of all that.
    """

    name: str
    focus: str

    def propose(self, view: SearchView) -> Proposal | None:
        """The program it thinks best to try next, never one that was proposed before; None when it has none."""
        ...

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        """A result of any agent's candidate. May be told again after a resume: the same result twice counts once."""
        ...

    def limits(self, view: SearchView) -> list[str]:
        """What this agent cannot propose here, and why: sentences for a person."""
        ...
