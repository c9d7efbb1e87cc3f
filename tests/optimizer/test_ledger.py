"""A run's bookkeeping: stored before told, a wish to stop is heard, and counts are of what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer import ledger as ledger_module
from optimizer.config import RunConfig
from optimizer.file_store import FileStore
from optimizer.ledger import Cancelled, Ledger
from optimizer.records import Candidate, Estimate, Experiment, Proposal, State
from optimizer.store import Lease, LeaseLost


class Beats:
    """Stands in for the pause between heartbeats: so many, then the end."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, timeout: float) -> bool:
        self.left -= 1
        return self.left < 0

    def set(self) -> None: ...


class Run:
    def __init__(self, folder: Path) -> None:
        self.store = FileStore(folder)
        self.config = RunConfig("demo", {"name": "demo"}, str(folder), budget_s=100)
        self.store.create(self.config.run_id, self.config.to_json())
        self.lease = self.claim()
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def claim(self, owner: str = "first", ttl_s: float = 60) -> Lease:
        lease = self.store.claim(self.config.run_id, owner, ttl_s)
        assert lease
        return lease

    def open(self, clock: Callable[[], float] = time.monotonic) -> Ledger:
        def hear(kind: str, payload: dict[str, Any]) -> None:
            self.heard.append((kind, payload))

        return Ledger(self.config, self.store, self.lease, hear, clock)

    def beat(self, ledger: Ledger, times: int = 1) -> None:
        ledger._stop = Beats(times)  # type: ignore[assignment]
        ledger._beat()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def candidate(digest: str, source: str = "s", focus: str = "attention", mechanism: str = "python") -> Candidate:
    return Candidate(digest, source, f"p-{digest}", digest, "agent", focus, mechanism, "why", "", "/a")


def experiment(digest: str, tier: int = 1, state: State = State.KEEP, device_s: float = 0.0) -> Experiment:
    one = Experiment(f"{digest}-{tier}", digest, tier, State.PREDICTED, "b", False, device_s=device_s)
    if state is State.FAILED:
        return replace(one, state=state, failure="it ended")
    return (
        one
        if state is State.PREDICTED
        else replace(one, state=state, checks_passed=True, ratio=1.2, ci_low=1.1, ci_high=1.3)
    )


def test_a_wish_to_stop_is_heard_at_the_next_heartbeat(run: Run) -> None:
    ledger = run.open()
    run.beat(ledger)
    ledger.check()
    run.store.cancel(run.config.run_id)
    run.beat(ledger)
    with pytest.raises(Cancelled):
        ledger.check()
    with pytest.raises(Cancelled):
        ledger.enter("search", "goes on")


def test_a_run_that_was_taken_over_stops_and_writes_nothing_more(run: Run) -> None:
    ledger = run.open()
    run.store.renew(run.lease, -1)
    run.claim("second")
    before = run.store.load(run.config.run_id)
    run.beat(ledger, times=5)
    with pytest.raises(LeaseLost, match="taken over by another worker"):
        ledger.check()
    for write in (
        lambda: ledger.log("still here"),
        lambda: ledger.experiment(candidate("a"), experiment("a")),
        lambda: ledger.estimate(Estimate("a", 1.0, 0.9, 1.1, "roofline")),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert run.store.load(run.config.run_id) == before
    assert run.heard == [], "nothing is told that was not stored"


def test_the_heartbeat_renews_the_lease(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", -1.0)
    run.store.renew(run.lease, -1)
    run.beat(run.open())
    assert run.store.claim(run.config.run_id, "second", 60) is None


def test_a_context_holds_the_lease_from_its_first_moment(run: Run) -> None:
    run.store.renew(run.lease, -1)
    with run.open() as ledger:
        assert run.store.claim(run.config.run_id, "second", 60) is None
        assert ledger._thread.is_alive()
    assert not ledger._thread.is_alive()


def test_the_heartbeat_waits_for_what_is_timed_but_not_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.01)
    ledger = run.open()
    run.store.cancel(run.config.run_id)
    with ledger.quiet:
        run.beat(ledger)
        assert not ledger.quiet.acquire(timeout=0), "it is the timing's own lock"
    with pytest.raises(Cancelled):
        ledger.check()
    run.beat(ledger)
    assert ledger.quiet.acquire(timeout=0)


def test_counts_are_of_measured_candidates_only(run: Run) -> None:
    ledger = run.open()
    rows = [
        (candidate("a", "s1", "attention", "python"), [(1, State.KEEP), (2, State.KEEP)]),
        (candidate("b", "s1", "attention", "python"), [(1, State.DISCARD)]),  # the same mechanism, other constants
        (candidate("c", "s2", "cache", "cpp"), [(1, State.RETEST)]),
        (candidate("d", "s3", "scheduling", "settings"), [(1, State.FAILED)]),
        (candidate("e", "s4", "projections", "compile"), [(1, State.PREDICTED)]),
        (candidate("f", "s5", "cache", "cpp"), [(1, State.MARGINAL), (2, State.FAILED)]),
    ]
    for one, results in rows:
        ledger.candidate(one, ok=True)
        for tier, state in results:
            ledger.experiment(one, experiment(one.artifact_hash, tier, state))
    ledger.verdict("a", True)
    ledger.verdict("f", False)
    expected = {"predicted": 1, "tier1": 4, "tier2": 1, "verified": 1, "failed": 2}
    expected |= {"duplicates": 0, "distinct_behaviours": 4}
    assert ledger.counts() == expected | {"distinct_sources": 3, "foci": 2, "mechanisms": 2}
    assert {e.id for e in ledger.measured(2)} == {"a-2"}
    told = [payload for kind, payload in run.heard if kind == "progress"]
    assert told[-2]["counts"]["tier1"] == 4 and told[-1]["counts"]["failed"] == 2


def test_rates_are_of_the_whole_run_and_utilisation_of_the_search(run: Run) -> None:
    run.store.set_progress(run.lease, "search", 1790.0)
    now = [1000.0]
    ledger = run.open(lambda: now[0])
    now[0] += 10.0
    assert ledger.elapsed() == pytest.approx(1800.0)
    ledger.candidate(candidate("a"), ok=True)
    with ledger.searching():
        with ledger.working("tier1"):
            now[0] += 5.0
        now[0] += 5.0
        ledger.experiment(candidate("a"), experiment("a", device_s=5.0))
    assert ledger.per_hour()["tier1"] == 2.0
    progress = run.heard[-1][1]
    assert progress["utilisation"] == 0.5 and progress["elapsed_s"] == 1810.0
    now[0] += 100.0
    assert ledger.utilisation == 0.5, "what comes after the search does not change it"


def test_a_later_attempt_knows_what_was_recorded(run: Run) -> None:
    first = run.open()
    proposal = Proposal("p-a", "agent", "cache", "idea", "why", "python", {"forward.py": ""})
    first.proposal(proposal)
    first.candidate(candidate("a"), ok=True)
    first.estimate(Estimate("a", 1.1, 1.0, 1.2, "roofline"))
    first.experiment(candidate("a"), experiment("a"))
    again = run.open()
    assert again.proposals == {"p-a": proposal} and again.candidates == {"a": candidate("a")}
    assert again.estimates == first.estimates and again.experiments == first.experiments
    assert again.counts() == first.counts()


def test_it_is_stored_before_it_is_told(run: Run) -> None:
    stored_when_told: dict[str, int] = {}

    def on_event(kind: str, payload: dict[str, Any]) -> None:
        state = run.store.load(run.config.run_id)
        stored_when_told[kind] = len(state.experiments) if kind == "experiment" else len(state.candidates)

    ledger = Ledger(run.config, run.store, run.lease, on_event)
    ledger.candidate(candidate("a"), ok=True)
    ledger.experiment(candidate("a"), experiment("a"))
    assert stored_when_told["candidate"] == 1 and stored_when_told["experiment"] == 1


def test_time_lost_is_booked_under_its_reason_also_when_it_ends_badly(run: Run) -> None:
    now = [0.0]
    ledger = run.open(lambda: now[0])
    for why, seconds in (("compiling", 2.0), ("agents thinking", 5.0), ("compiling", 1.0)):
        with pytest.raises(ValueError, match="bad"), ledger.losing(why):
            now[0] += seconds
            raise ValueError("bad")
    assert ledger.time_lost() == [
        {"why": "agents thinking", "seconds": 5.0},
        {"why": "compiling", "seconds": 3.0},
    ]
