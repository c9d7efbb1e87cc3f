"""A run's accounting: planted counts come out, what was not confirmed is no gain, and one look is shown for what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.accounting import account
from optimizer.accounting_text import sentences
from optimizer.config import RunConfig
from optimizer.file_store import FileStore
from optimizer.ledger import Ledger
from optimizer.records import Candidate, Experiment, State
from optimizer.store import Lease

PLANTED = (  # name, first pair, tier 1: ratio and state; tier 2: ratio and whether it leads
    ("wins", 1.9, 1.5, State.KEEP, (1.4, True)),
    ("looked good", 1.4, 0.99, State.DISCARD, None),
    ("refuted", 1.3, 1.2, State.KEEP, (0.98, False)),
    ("no time left", 1.2, 1.1, State.MARGINAL, None),
    ("slower", 0.8, 0.8, State.DISCARD, None),
)


class Books:
    """A ledger on a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.store = FileStore(folder)
        self.config = RunConfig("demo", {"name": "demo"}, str(folder), budget_s=100)
        self.store.create(self.config.run_id, self.config.to_json())
        self.ledger = self.open()

    def open(self) -> Ledger:
        lease = self.store.claim(self.config.run_id, "worker", 0.0)
        assert isinstance(lease, Lease)
        return Ledger(self.config, self.store, lease, clock=lambda: self.now)

    def measured(self, name: str, one: float, ratio: float, state: State, whole: tuple[float, bool] | None) -> None:
        self.ledger.candidate(Candidate(name, f"s {name}", "p", name, "ada", "cache", "cpp", "why", "", "/a"), ok=True)
        first = _experiment(name, 1, ratio, state, [one, ratio, ratio])
        with self.ledger.working("tier1"):
            self.now += 10.0
        self.ledger.experiment(self.ledger.candidates[name], first)
        if whole:
            again = _experiment(name, 2, whole[0], State.KEEP if whole[0] > 1 else State.DISCARD, [whole[0]])
            with self.ledger.working("tier2"):
                self.now += 20.0
            self.ledger.experiment(self.ledger.candidates[name], replace(again, leads=whole[1]))


def _experiment(name: str, tier: int, ratio: float, state: State, samples: list[float]) -> Experiment:
    return Experiment(
        f"{name}-{tier}", name, tier, state, "baseline", True, ratio, ratio - 0.05, ratio + 0.05, samples,
        predicted=ratio * 1.1, provenance="roofline", paired=ratio,
    )  # fmt: skip


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


@pytest.fixture
def found(books: Books) -> dict[str, Any]:
    for row in PLANTED:
        books.measured(*row)
    with books.ledger.stage("verified"):
        books.now += 7.0
    books.ledger.verdict("wins", True)
    books.now += 3.0
    return account(books.ledger, "wins", {"ratio": 1.35, "ci_low": 1.3, "ci_high": 1.4})


def test_counts_and_seconds_of_each_stage(found: dict[str, Any]) -> None:
    stages = {row["stage"]: (row["count"], row["seconds"]) for row in found["stages"]}
    assert stages["tier1"] == (5, 50.0) and stages["tier2"] == (2, 40.0)
    assert stages["verified"] == (1, 7.0) and stages["predicted"] == (0, 0.0)
    assert found["device_s"] == 100.0 and found["device_worked_s"] == 97.0
    assert found["distinct_per_device_hour"] == pytest.approx(5 / 100 * 3600)


def test_what_was_kept_and_what_of_it_was_confirmed(found: dict[str, Any]) -> None:
    kept = found["kept"]
    assert (kept["measured"], kept["kept"], kept["confirmed"], kept["refuted"], kept["unconfirmed"]) == (5, 3, 1, 1, 1)
    assert kept["keep_rate"] == 0.6 and kept["confirmed_keep_rate"] == 0.5


def test_one_look_claims_more_than_holds(found: dict[str, Any]) -> None:
    assert found["one_look"] == {"claimed": 4, "held": 3, "false_share": 0.25}
    assert [g["name"] for g in found["gains"]][:2] == ["wins", "looked good"], "by what one look claimed"
    wins, good = found["gains"][:2]
    assert wins["one_look"] == pytest.approx(1.9) and good["one_look"] == pytest.approx(1.4)
    assert (wins["tier2"]["ratio"], wins["confirmed"]) == (1.4, True)
    assert (good["tier2"], good["confirmed"]) == (None, False)
    assert found["winner"]["end_to_end"]["ratio"] == 1.35


def test_a_look_beside_an_incumbent_counts_over_the_baseline(books: Books) -> None:
    books.measured("beside", 1.1, 1.2, State.KEEP, None)
    first = books.ledger.experiments["beside-1"]
    books.ledger.experiments["beside-1"] = replace(first, ratio=2.4, ci_low=2.3, ci_high=2.5, paired=1.2)
    assert account(books.ledger)["gains"][0]["one_look"] == pytest.approx(2.2)


def test_a_program_that_came_back_is_judged_by_its_last_visit(books: Books) -> None:
    books.measured("unsure", 0.9, 1.05, State.RETEST, None)
    later = _experiment("unsure", 1, 1.06, State.KEEP, [0.9, 1.2])
    books.ledger.experiment(books.ledger.candidates["unsure"], replace(later, id="unsure-1v2", visit=2))
    found = account(books.ledger)
    assert found["kept"]["kept"] == 1 and found["kept"]["measured"] == 1
    assert found["one_look"]["claimed"] == 0, "its first pair alone would have lost it"
    assert found["gains"][0]["tier1"]["ratio"] == 1.06


def test_errors_of_predictions_by_what_stood_behind_them(found: dict[str, Any]) -> None:
    assert [(p["tier"], p["provenance"], p["count"]) for p in found["predictions"]] == [
        (1, "roofline", 5),
        (2, "roofline", 2),
    ]
    assert all(p["median_error"] == pytest.approx(0.1) for p in found["predictions"])


def test_seconds_of_an_attempt_that_was_killed_are_kept(books: Books) -> None:
    books.measured(*PLANTED[0])
    with books.ledger.losing("compiling"):
        books.now += 4.0
    books.ledger.progress()
    again = books.open()
    assert again.lease.attempt == 2
    stages = {row["stage"]: row["seconds"] for row in account(again)["stages"]}
    assert (stages["tier1"], stages["tier2"]) == (10.0, 20.0)
    assert again.time_lost() == [{"why": "compiling", "seconds": 4.0}]


def test_a_run_that_measured_nothing_has_no_rates(books: Books) -> None:
    found = account(books.ledger)
    assert found["kept"]["keep_rate"] is None and found["kept"]["confirmed_keep_rate"] is None
    assert found["gains"] == [] and found["winner"] is None and found["distinct_per_device_hour"] is None
    assert "Nothing was measured" in " ".join(sentences(found, []))


def test_it_is_said_in_words(found: dict[str, Any]) -> None:
    said = " ".join(sentences(found, [{"why": "compiling", "seconds": 4.0}]))
    assert "Tier 1 kept 3 of 5 (60%); all layers confirmed 1 of 2 (50%); not measured there: 1." in said
    assert "25% of single looks would have been false wins" in said
    assert "wins: its first pair showed 1.90x, tier 1 1.50x (1.45 to 1.55), tier 2 1.40x" in said
    assert "4.0 s compiling" in said and "180 distinct programs measured a device-hour" in said
