"""What every `RunStore` promises. A backend's tests subclass `StoreContract` and give a `harness` fixture.

A harness has `create(config) -> run_id` (a new queued run), `store() -> RunStore` (a new instance over the same data,
as another process would have) and `cancel(run_id)` (a person asks the run to stop).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Protocol

import pytest

from optimizer.records import Candidate, Check, Estimate, Experiment, Post, Proposal, State, Verdict
from optimizer.store import Lease, LeaseLost, RunStore

CONFIG = {"model": "demo", "traffic": {"name": "demo"}, "data_dir": "data"}
HASH = "a" * 64


class Harness(Protocol):
    def create(self, config: dict[str, Any]) -> str: ...

    def store(self) -> RunStore: ...

    def cancel(self, run_id: str) -> None: ...


def proposal(number: int = 1) -> Proposal:
    files = {"forward.py": f"def build(model, settings):\n    return {number}  # größer\n"}
    return Proposal(
        f"p{number}",
        "projections-1",
        "projections",
        f"idea {number}",
        "fewer passes",
        "python",
        files,
        {"block_size": 32},
    )


def candidate(digest: str = HASH) -> Candidate:
    return Candidate(
        digest,
        "b" * 64,
        "p1",
        "idea 1",
        "projections-1",
        "projections",
        "python",
        "fewer passes",
        "",
        "/artifacts/a",
        0.1,
    )


def experiment(name: str = "e1", tier: int = 1) -> Experiment:
    return Experiment(
        name,
        HASH,
        tier,
        State.KEEP,
        "c" * 64,
        True,
        1.31,
        1.27,
        1.35,
        [1.3, 1.32],
        predicted=1.2,
        device_s=2.5,
        hot_swap_s=0.2,
    )


def check(case: str = "nan") -> Check:
    return Check(HASH, "poison", "contamination", case, 0.0, 0.0, "bytes", Verdict.PASS, True, "seed 7")


class StoreContract:
    @pytest.fixture
    def held(self, harness: Harness) -> tuple[RunStore, Lease]:
        store = harness.store()
        lease = store.claim(harness.create(CONFIG), "worker-1", 60)
        assert lease is not None
        return store, lease

    def test_a_run_is_claimed_once_while_its_lease_lives(self, harness: Harness) -> None:
        run_id = harness.create(CONFIG)
        lease = harness.store().claim(run_id, "worker-1", 60)
        assert lease is not None
        assert (lease.run_id, lease.owner, lease.attempt) == (run_id, "worker-1", 1)
        assert harness.store().claim(run_id, "worker-2", 60) is None

    def test_an_expired_lease_goes_to_the_next_worker_as_a_new_attempt(self, harness: Harness) -> None:
        run_id = harness.create(CONFIG)
        assert harness.store().claim(run_id, "worker-1", -1) is not None
        second = harness.store().claim(run_id, "worker-2", 60)
        assert second is not None
        assert second.attempt == 2

    def test_a_renewed_lease_stays_its_owners(self, harness: Harness) -> None:
        store, run_id = harness.store(), harness.create(CONFIG)
        lease = store.claim(run_id, "worker-1", -1)
        assert lease is not None
        renewed = store.renew(lease, 60)
        assert renewed.expires > lease.expires
        assert harness.store().claim(run_id, "worker-2", 60) is None

    def test_only_one_of_many_claims_at_the_same_moment_wins(self, harness: Harness) -> None:
        run_id, won = harness.create(CONFIG), []
        stores = [harness.store() for _ in range(4)]
        start = threading.Barrier(len(stores))

        def claim(number: int) -> None:
            start.wait()
            lease = stores[number].claim(run_id, f"worker-{number}", 60)
            if lease is not None:
                won.append(lease)

        threads = [threading.Thread(target=claim, args=(n,)) for n in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1

    def test_a_worker_that_lost_its_lease_can_write_nothing(self, harness: Harness) -> None:
        store, run_id = harness.store(), harness.create(CONFIG)
        old = store.claim(run_id, "worker-1", -1)
        new = harness.store().claim(run_id, "worker-2", 60)
        assert old is not None and new is not None
        writes = [
            lambda: store.renew(old, 60),
            lambda: store.append_event(old, "log", {}),
            lambda: store.put_proposal(old, proposal()),
            lambda: store.put_candidate(old, candidate()),
            lambda: store.put_estimate(old, Estimate(HASH, 1.2, 1.0, 1.4, "roofline")),
            lambda: store.put_experiment(old, experiment()),
            lambda: store.put_checks(old, [check()]),
            lambda: store.put_post(old, Post("x", "a", "insight", "t")),
            lambda: store.put_report(old, {"schema": 1}),
            lambda: store.set_progress(old, "search", 9.0),
            lambda: store.finish(old, "failed"),
        ]
        for write in writes:
            with pytest.raises(LeaseLost):
                write()
        state = harness.store().load(run_id)
        assert (state.proposals, state.candidates, state.experiments, state.checks, state.posts) == ([], [], [], [], [])
        assert (state.report, state.elapsed_s, harness.store().events(run_id)) == (None, 0.0, [])

    def test_a_finished_run_is_over(self, harness: Harness, held: tuple[RunStore, Lease]) -> None:
        store, lease = held
        store.finish(lease, "no_gain", "Nothing beat the baseline.")
        assert harness.store().claim(lease.run_id, "worker-2", 60) is None
        with pytest.raises(LeaseLost):
            store.append_event(lease, "log", {"text": "late"})

    def test_events_are_numbered_from_one_without_gaps(self, harness: Harness, held: tuple[RunStore, Lease]) -> None:
        store, lease = held
        assert [store.append_event(lease, "log", {"n": n}) for n in range(25)] == list(range(1, 26))
        events = harness.store().events(lease.run_id)
        assert [(e["seq"], e["kind"], e["payload"]["n"]) for e in events] == [(n + 1, "log", n) for n in range(25)]
        assert all(e["at"] for e in events)

    def test_a_later_attempt_goes_on_numbering_where_the_first_stopped(self, harness: Harness) -> None:
        run_id, store = harness.create(CONFIG), harness.store()
        first = store.claim(run_id, "worker-1", -1)
        assert first is not None
        store.append_event(first, "log", {})
        second = harness.store().claim(run_id, "worker-2", 60)
        assert second is not None
        assert harness.store().append_event(second, "log", {}) == 2

    def test_events_after_a_number_come_in_order_and_no_more_than_asked(
        self, harness: Harness, held: tuple[RunStore, Lease]
    ) -> None:
        store, lease = held
        for n in range(10):
            store.append_event(lease, "log", {"n": n})
        assert [e["seq"] for e in harness.store().events(lease.run_id, after=4)] == [5, 6, 7, 8, 9, 10]
        assert [e["seq"] for e in harness.store().events(lease.run_id, after=4, limit=2)] == [5, 6]
        assert harness.store().events(lease.run_id, after=10) == []

    def test_everything_put_is_there_for_the_worker_that_resumes(
        self, harness: Harness, held: tuple[RunStore, Lease]
    ) -> None:
        store, lease = held
        estimate, post = (
            Estimate(HASH, 1.2, 1.0, 1.5, "roofline", {"floor_s": 0.01}),
            Post("x1", "a", "insight", "Größer is slower.", data={"n": 1}),
        )
        store.put_proposal(lease, proposal())
        store.put_candidate(lease, candidate())
        store.put_estimate(lease, estimate)
        store.put_experiment(lease, experiment())
        store.put_checks(lease, [check("nan"), check("finite")])
        store.put_post(lease, post)
        store.put_report(lease, {"schema": 1, "speedup": {"ratio": 1.4}})
        store.set_progress(lease, "search", 12.5)
        state = harness.store().load(lease.run_id)
        assert state.config["model"] == CONFIG["model"] and state.config["traffic"] == CONFIG["traffic"]
        assert (state.proposals, state.candidates, state.estimates) == ([proposal()], [candidate()], [estimate])
        assert (state.experiments, state.checks, state.posts) == (
            [experiment()],
            [check("nan"), check("finite")],
            [post],
        )
        assert state.report is not None and state.report["speedup"]["ratio"] == 1.4
        assert (state.phase, state.elapsed_s) == ("search", 12.5)

    def test_putting_the_same_record_again_replaces_it(self, harness: Harness, held: tuple[RunStore, Lease]) -> None:
        store, lease = held
        store.put_experiment(lease, experiment("e1"))
        store.put_experiment(lease, experiment("e2", tier=2))
        store.put_experiment(lease, replace(experiment("e1"), ratio=1.4))
        store.put_checks(lease, [check()])
        store.put_checks(lease, [replace(check(), verdict=Verdict.FAIL)])
        state = harness.store().load(lease.run_id)
        assert [(e.id, e.ratio) for e in state.experiments] == [("e1", 1.4), ("e2", 1.31)]
        assert [c.verdict for c in state.checks] == [Verdict.FAIL]

    def test_a_failed_experiment_keeps_its_log(self, harness: Harness, held: tuple[RunStore, Lease]) -> None:
        store, lease = held
        failed = Experiment(
            "e9",
            HASH,
            1,
            State.FAILED,
            "c" * 64,
            False,
            failure="It did not compile.",
            log_tail="error: expected ';'\n",
        )
        store.put_experiment(lease, failed)
        assert harness.store().load(lease.run_id).experiments == [failed]

    def test_numbers_that_json_lacks_are_stored_as_nothing(
        self, harness: Harness, held: tuple[RunStore, Lease]
    ) -> None:
        store, lease = held
        store.append_event(lease, "log", {"nan": float("nan"), "deep": [{"inf": float("inf")}]})
        assert harness.store().events(lease.run_id)[0]["payload"] == {"nan": None, "deep": [{"inf": None}]}

    def test_a_person_can_ask_a_run_to_stop(self, harness: Harness, held: tuple[RunStore, Lease]) -> None:
        store, lease = held
        assert store.cancelled(lease.run_id) is False
        harness.cancel(lease.run_id)
        assert harness.store().cancelled(lease.run_id) is True

    def test_runs_do_not_see_each_other(self, harness: Harness, held: tuple[RunStore, Lease]) -> None:
        store, lease = held
        store.put_experiment(lease, experiment())
        store.append_event(lease, "log", {})
        other = harness.create(CONFIG)
        assert harness.store().load(other).experiments == []
        assert harness.store().events(other) == []

    def test_an_unknown_run_is_an_error(self, harness: Harness) -> None:
        with pytest.raises(KeyError):
            harness.store().load("00000000-0000-4000-8000-000000000000")
