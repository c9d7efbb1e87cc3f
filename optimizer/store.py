"""`RunStore`: where a run's truth lives. One protocol, a file-backed store for the command line, a Django one for the web.

Both pass `tests/contracts/store_contract.py`. Every write is durable before the call returns; a killed process loses
nothing that was measured. Events are numbered per run from 1 without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from optimizer.records import Candidate, Check, Estimate, Experiment, Post, Proposal


class LeaseLost(Exception):
    """Another worker holds the run: stop at once and write nothing more."""


@dataclass(frozen=True, slots=True)
class Lease:
    run_id: str
    owner: str
    attempt: int  # 1 for the first worker that claimed the run
    expires: float  # unix time


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything a resumed search needs."""

    run_id: str
    config: dict[str, Any]
    phase: str = "queued"
    proposals: list[Proposal] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    posts: list[Post] = field(default_factory=list)
    report: dict[str, Any] | None = None
    elapsed_s: float = 0.0  # search time already spent by earlier attempts


class RunStore(Protocol):
    """Methods that write raise LeaseLost when `lease` is no longer the run's."""

    def claim(self, run_id: str, owner: str, ttl_s: float) -> Lease | None:
        """The lease, or None while another live lease holds the run or the run has ended. A conditional update."""
        ...

    def renew(self, lease: Lease, ttl_s: float) -> Lease: ...

    def finish(self, lease: Lease, outcome: str, reason: str = "") -> None:
        """End the run: `succeeded`, `no_gain`, `failed` or `cancelled`. The reason is a sentence a person reads."""
        ...

    def cancelled(self, run_id: str) -> bool:
        """Whether a person asked for the run to stop."""
        ...

    def append_event(self, lease: Lease, kind: str, payload: dict[str, Any]) -> int:
        """Appends to the run's event log and returns the event's seq."""
        ...

    def events(self, run_id: str, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Events with seq > after, in order: `{seq, at, kind, payload}`."""
        ...

    def put_proposal(self, lease: Lease, proposal: Proposal) -> None: ...

    def put_candidate(self, lease: Lease, candidate: Candidate) -> None: ...

    def put_estimate(self, lease: Lease, estimate: Estimate) -> None: ...

    def put_experiment(self, lease: Lease, experiment: Experiment) -> None: ...

    def put_checks(self, lease: Lease, checks: list[Check]) -> None: ...

    def put_post(self, lease: Lease, post: Post) -> None: ...

    def put_report(self, lease: Lease, report: dict[str, Any]) -> None: ...

    def set_progress(self, lease: Lease, phase: str, elapsed_s: float) -> None: ...

    def load(self, run_id: str) -> RunState:
        """Raises KeyError for an unknown run."""
        ...
