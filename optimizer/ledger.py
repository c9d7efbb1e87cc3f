"""A run's bookkeeping: every record goes to the store before the search acts on it, every change becomes an event.

It keeps the run's clock (earlier attempts included), renews the lease from a thread of its own, hears a person's
wish to stop, and knows how much time was lost to what.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from optimizer.config import RunConfig
from optimizer.records import (
    MEASURED,
    Candidate,
    Check,
    Estimate,
    Experiment,
    Post,
    Proposal,
    State,
    Verdict,
    to_json,
)
from optimizer.store import Lease, LeaseLost, RunState, RunStore
from optimizer.times import Times

LEASE_TTL_S = 30.0
BEAT_S = 2.0
RENEW_S = 6.0
RATES = ("predicted", "tier1", "tier2", "verified", "distinct_behaviours")  # counts that are also told an hour
OnEvent = Callable[[str, dict[str, Any]], None]


class Cancelled(Exception):
    """A person asked the run to stop."""


class Ledger(Times):
    """Use as a context: the heartbeat lives inside it."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        lease: Lease,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self.config, self.store, self.lease = config, store, lease
        self.state: RunState = store.load(config.run_id)
        self.phase = self.state.phase
        self.proposals = {p.id: p for p in self.state.proposals}
        self.candidates = {c.artifact_hash: c for c in self.state.candidates}
        self.experiments = {e.id: e for e in self.state.experiments}
        self.estimates = {e.artifact_hash: e for e in self.state.estimates}
        self.verified: dict[str, bool] = {}
        self.usage: dict[str, dict[str, Any]] = {}  # agent -> its `llm_usage`
        if lease.attempt > 1:
            self.usage, spent = last_told(store, config.run_id)
            self.go_on_from(spent)
        self.standing: dict[str, list[dict[str, Any]]] = {}  # `foci` and `elites`, as they were told last
        self.swaps: dict[str, float] = {}  # by kind, the latest
        self.device_s = 0.0  # spent timing candidates, this attempt
        self.best_ratio = 1.0
        self._on_event = on_event or (lambda kind, payload: None)
        self._start = clock()
        self._stop = threading.Event()
        self._cancelled = self._lease_lost = False
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")

    def __enter__(self) -> Ledger:
        self.store.renew(self.lease, LEASE_TTL_S)  # whoever claimed it may have asked for less
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def elapsed(self) -> float:
        """Seconds this run has taken, earlier attempts included."""
        return self.state.elapsed_s + self.clock() - self._start

    def check(self) -> None:
        """Raises Cancelled or LeaseLost when the run is no longer to go on. Call between measurements."""
        if self._lease_lost:
            raise LeaseLost(f"run {self.config.run_id} was taken over by another worker")
        if self._cancelled:
            raise Cancelled

    @property
    def stopping(self) -> bool:
        """Whether `check` would raise."""
        return self._cancelled or self._lease_lost

    def enter(self, phase: str, message: str) -> None:
        self.check()
        self.phase = phase
        self.store.set_progress(self.lease, phase, self.elapsed())
        self.event("phase", {"phase": phase, "message": message})
        self.progress()

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        self.store.append_event(self.lease, kind, payload)
        self._on_event(kind, payload)

    def log(self, text: str, level: str = "info") -> None:
        self.event("log", {"level": level, "text": text})

    def proposal(self, proposal: Proposal) -> None:
        self.proposals[proposal.id] = proposal
        self.store.put_proposal(self.lease, proposal)
        fields = ("id", "name", "focus", "agent", "mechanism", "hypothesis")
        self.event("proposal", {f: getattr(proposal, f) for f in fields})

    def candidate(self, candidate: Candidate, ok: bool) -> None:
        self.candidates[candidate.artifact_hash] = candidate
        self.store.put_candidate(self.lease, candidate)
        fields = ("artifact_hash", "source_hash", "proposal_id", "name", "build_s")
        self.event("candidate", {f: getattr(candidate, f) for f in fields} | {"ok": ok})

    def estimate(self, estimate: Estimate) -> None:
        self.estimates[estimate.artifact_hash] = estimate
        self.store.put_estimate(self.lease, estimate)
        self.event("estimate", to_json(estimate))

    def experiment(self, candidate: Candidate, experiment: Experiment) -> None:
        self.experiments[experiment.id] = experiment
        self.device_s += experiment.device_s
        self.store.put_experiment(self.lease, experiment)
        named = {"name": candidate.name, "focus": candidate.focus, "mechanism": candidate.mechanism}
        self.event("experiment", to_json(experiment) | named)
        self.progress()

    def incumbent(self, candidate: Candidate, ratio: float, low: float, high: float) -> None:
        self.best_ratio = ratio
        named = {"artifact_hash": candidate.artifact_hash, "name": candidate.name}
        self.event("incumbent", named | {"ratio": ratio, "ci_low": low, "ci_high": high})

    def post(self, post: Post) -> None:
        self.store.put_post(self.lease, post)
        self.event("post", to_json(post))

    def checks(self, checks: list[Check]) -> None:
        self.store.put_checks(self.lease, checks)
        for check in checks:
            self.event("check", to_json(check))

    def llm_usage(self, totals: dict[str, Any]) -> None:
        """What an agent's language model took so far, earlier attempts included: `totals["agent"]` names the agent.

        Comes from the agent's thread, and waits for what is being timed.
        """
        between = self.quiet.acquire(timeout=RENEW_S)
        try:
            self.usage[totals["agent"]] = totals
            self.event("llm_usage", totals)
        finally:
            if between:
                self.quiet.release()

    def stands(self, kind: str, rows: list[dict[str, Any]]) -> None:
        """Where the search looks (`foci`) and the best program of each cell (`elites`), when that has changed."""
        if rows != self.standing.get(kind):
            self.standing[kind] = rows
            self.event(kind, {"rows": rows})

    def verdict(self, artifact_hash: str, passed: bool) -> None:
        self.verified[artifact_hash] = passed

    def swap(self, kind: str, seconds: float) -> None:
        self.swaps[kind] = seconds
        self.event("swap", {"kind": kind, "seconds": seconds})

    def restored_checks(self) -> dict[str, list[Check]]:
        """Checks of an earlier attempt, by artefact."""
        found: dict[str, list[Check]] = defaultdict(list)
        for check in self.state.checks:
            found[check.artifact_hash].append(check)
        return found

    def measured(self, tier: int = 1) -> list[Experiment]:
        return [e for e in self.experiments.values() if e.tier >= tier and e.state in MEASURED]

    def counts(self) -> dict[str, Any]:
        """Distinct sources, foci and mechanisms are of measured candidates only; predicted ones are counted apart.

        Distinct behaviours are of programs whose checks passed in tier 1: other text that does the same is one.
        """
        by_tier = {t: {e.artifact_hash for e in self.measured() if e.tier == t} for t in (1, 2)}
        measured = [self.candidates[h] for h in by_tier[1] | by_tier[2] if h in self.candidates]
        failed = {e.artifact_hash for e in self.experiments.values() if e.state is State.FAILED}
        return {
            "predicted": len([e for e in self.experiments.values() if e.state is State.PREDICTED]),
            "tier1": len(by_tier[1]),
            "tier2": len(by_tier[2]),
            "verified": sum(self.verified.values()),
            "failed": len(failed),
            "duplicates": len([e for e in self.experiments.values() if e.state is State.DUPLICATE]),
            "distinct_behaviours": len({e.behaviour or e.artifact_hash for e in self.measured() if e.tier == 1}),
            "distinct_sources": len({c.source_hash for c in measured}),
            "foci": len({c.focus for c in measured}),
            "mechanisms": len({c.mechanism for c in measured}),
        }

    def by_agent(self) -> list[dict[str, Any]]:
        """What became of each agent's proposals, and what its language model took (`llm`, None for agents without one).

        `kept` are candidates that were faster for certain on the whole model.
        """
        proposed = Counter(p.agent for p in self.proposals.values())
        states: dict[str, set[tuple[str, State, int]]] = defaultdict(set)
        for e in self.experiments.values():
            if e.artifact_hash in self.candidates:
                states[self.candidates[e.artifact_hash].agent].add((e.artifact_hash, e.state, e.tier))
        return [
            {
                "agent": agent,
                "proposals": proposed[agent],
                "measured": len({h for h, state, _ in states[agent] if state in MEASURED}),
                "kept": len({h for h, state, tier in states[agent] if state is State.KEEP and tier >= 2}),
                "failed": len({h for h, state, _ in states[agent] if state is State.FAILED}),
                "llm": {k: v for k, v in self.usage[agent].items() if k != "agent"} if agent in self.usage else None,
            }
            for agent in sorted({*proposed, *self.usage})
        ]

    def per_hour(self) -> dict[str, float]:
        hours = max(self.elapsed(), 1.0) / 3600
        counts = self.counts()
        return {k: round(counts[k] / hours, 1) for k in RATES}

    def progress(self) -> None:
        """Where the run stands. The time left is a range: verification of a second finalist, or none, moves the end."""
        elapsed, budget = self.elapsed(), self.config.budget_s
        left = max(budget - elapsed, 0.0)
        self.event(
            "progress",
            {
                "elapsed_s": round(elapsed, 2),
                "budget_s": budget,
                "eta_low_s": round(0.8 * left, 1),
                "eta_high_s": round(left + 0.25 * budget, 1) if self.phase != "report" else 5.0,
                "counts": self.counts(),
                "per_hour": self.per_hour(),
                "utilisation": round(self.utilisation, 3),
                "best_ratio": self.best_ratio,
                "spent": self.spent(),
            },
        )

    def _beat(self) -> None:
        """Renews the lease and looks for a wish to stop; between timed blocks, unless those leave no gap for long."""
        renewed = time.monotonic()
        while not self._stop.wait(BEAT_S):
            between = self.quiet.acquire(timeout=RENEW_S)
            try:
                if time.monotonic() - renewed > RENEW_S:
                    self.store.renew(self.lease, LEASE_TTL_S)
                    renewed = time.monotonic()
                self._cancelled = self._cancelled or self.store.cancelled(self.config.run_id)
                self.store.set_progress(self.lease, self.phase, self.elapsed())
                self.progress()
            except LeaseLost:
                self._lease_lost = True
                return
            finally:
                if between:
                    self.quiet.release()


def last_told(store: RunStore, run_id: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Agent -> its last `llm_usage` event, and the last `Times.spent`, of all attempts."""
    usage: dict[str, dict[str, Any]] = {}
    spent: dict[str, Any] = {}
    after = 0
    while events := store.events(run_id, after):
        usage |= {e["payload"]["agent"]: e["payload"] for e in events if e["kind"] == "llm_usage"}
        spent = next((e["payload"].get("spent", {}) for e in reversed(events) if e["kind"] == "progress"), spent)
        after = events[-1]["seq"]
    return usage, spent


def passed(checks: list[Check]) -> bool:
    """A finalist is verified when nothing failed and something was checked. Inconclusive is not a pass."""
    judged = [c for c in checks if c.verdict is not Verdict.NOT_APPLICABLE]
    return bool(judged) and all(c.verdict is Verdict.PASS for c in judged)


__all__ = ["Cancelled", "Ledger", "OnEvent", "passed"]
