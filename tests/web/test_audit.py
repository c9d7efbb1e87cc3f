"""The audit log: whole, in order, apart for each organisation; a changed, removed or added entry shows."""

from __future__ import annotations

import csv
import io
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.test import Client

from polymorph_web.accounts.models import Organisation, User
from polymorph_web.audit import log
from polymorph_web.audit.models import Entry

As = Callable[[str], Client]


@pytest.fixture
def entries(organisation: Organisation, people: dict[str, User]) -> list[Entry]:
    actors = (people["member"], people["approver"], None, people["admin"])
    return [
        log.record(
            organisation, actor, f"act.{n}", f"thing {n}", reason=f"größer {n}", after={"ratio": 1.0 / 3, "n": n}
        )
        for n, actor in enumerate(actors, 1)
    ]


def test_a_chain_that_nobody_touched_is_intact(entries: list[Entry], organisation: Organisation, as_: As) -> None:
    assert log.broken_at(organisation) is None
    assert [e.seq for e in entries] == [1, 2, 3, 4]
    assert [e.previous_hash for e in entries] == [log.START, *(e.hash for e in entries[:-1])]
    response = as_("viewer").get("/audit/")
    assert response.context["intact"] and response.context["broken_at"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "nicer"}, {"actor_name": "admin"}, {"action": "act.x"}, {"target": "other"}, {"at": 1.0},
        {"after": {"ratio": 2}}, {"before": {"x": 1}}, {"request_id": "r"}, {"hash": "0" * 64}, {"previous_hash": "0" * 64},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_an_edited_entry_is_found_with_its_place(
    change: dict[str, Any], entries: list[Entry], organisation: Organisation, as_: As
) -> None:
    Entry.objects.filter(organisation=organisation, seq=2).update(**change)
    assert log.broken_at(organisation) == 2
    response = as_("viewer").get("/audit/")
    assert not response.context["intact"] and response.context["broken_at"] == 2
    assert "2" in response.content.decode() and response.status_code == 200


def test_a_removed_entry_is_found(entries: list[Entry], organisation: Organisation) -> None:
    Entry.objects.filter(organisation=organisation, seq=3).delete()
    assert log.broken_at(organisation) == 3


def test_an_entry_put_in_between_is_found(entries: list[Entry], organisation: Organisation) -> None:
    """Even one that is hashed well: those after it were hashed over another."""
    Entry.objects.filter(seq=4).update(seq=5)
    forged = Entry(organisation=organisation, seq=4, at=1.0, actor_name="x", action="a", target="t")
    forged.previous_hash = entries[2].hash
    forged.hash = log.digest(forged)
    forged.save()
    assert log.broken_at(organisation) == 5


def test_organisations_have_chains_of_their_own(entries: list[Entry], people: dict[str, User], as_: As) -> None:
    other = Organisation.objects.get(slug="other")
    assert log.record(other, people["stranger"], "act", "their thing").seq == 1
    assert log.broken_at(other) is None
    assert "their thing" not in as_("admin").get("/audit/").content.decode()
    assert "thing 1" not in as_("stranger").get("/audit/").content.decode()


def test_writers_at_the_same_moment_keep_one_chain(
    transactional_db: None, organisation: Organisation, people: dict[str, User]
) -> None:
    start, failures = threading.Barrier(4), []

    def write() -> None:
        try:
            start.wait()
            for n in range(5):
                log.record(organisation, None, "act", f"thing {n}")
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert Entry.objects.count() == 20 and log.broken_at(organisation) is None


def test_the_product_itself_is_named_system(entries: list[Entry]) -> None:
    assert [e.actor_name for e in entries] == ["member", "approver", "system", "admin"]


def test_an_entry_names_the_request_it_came_from(endpoint: object, as_: As) -> None:
    form = {"budget_minutes": "5", "tolerance": "near", "foci": ["cache"]}
    as_("member").post("/e/chat/optimise/", form)
    assert uuid.UUID(Entry.objects.get(action="run.start").request_id)


@pytest.mark.parametrize(
    ("q", "found"), [("approver", [2]), ("act.1", [1]), ("größer 3", [3]), ("thing act.4", [4]), ("nothing", [])]
)
def test_the_log_is_searched(q: str, found: list[int], entries: list[Entry], as_: As) -> None:
    response = as_("viewer").get("/audit/", {"q": q})
    assert [e.seq for e in response.context["entries"]] == found
    assert q in response.content.decode()


@pytest.mark.parametrize("page", ["1", "2", "99", "x"])
def test_a_long_log_has_pages(page: str, organisation: Organisation, as_: As) -> None:
    for n in range(60):
        log.record(organisation, None, "act", f"thing {n}")
    response = as_("viewer").get("/audit/", {"page": page})
    assert response.status_code == 200
    assert response.context["page_obj"].paginator.count == 60


def test_the_export_holds_every_entry_in_order(entries: list[Entry], as_: As) -> None:
    client = as_("viewer")
    rows = client.get("/audit/export.json").json()
    assert [(r["seq"], r["hash"]) for r in rows] == [(e.seq, e.hash) for e in entries]
    assert rows[2]["actor"] == "system" and rows[0]["after"] == {"ratio": 1.0 / 3, "n": 1}
    table = list(csv.DictReader(io.StringIO(client.get("/audit/export.csv").content.decode())))
    assert [(r["seq"], r["reason"], r["hash"]) for r in table] == [(str(e.seq), e.reason, e.hash) for e in entries]
    assert client.get("/audit/export.xml").status_code == 404


def test_a_cell_of_the_export_is_no_formula(organisation: Organisation, people: dict[str, User], as_: As) -> None:
    """A reason is anybody's text, and spreadsheets run what begins with an equals sign."""
    log.record(organisation, people["member"], "act", "thing", reason='=HYPERLINK("http://evil.example")')
    (row,) = csv.DictReader(io.StringIO(as_("viewer").get("/audit/export.csv").content.decode()))
    assert row["reason"].startswith("'=")


def test_entries_are_escaped(organisation: Organisation, people: dict[str, User], as_: As) -> None:
    log.record(organisation, people["member"], "act", "<script>alert(1)</script>", reason="<b>", after={"x": "<i>"})
    html = as_("viewer").get("/audit/").content.decode()
    assert "<script>alert(1)" not in html and "<b>" not in html.split("</header>")[-1] and "<i>" not in html


def test_long_names_are_shown_short_and_kept_whole(
    organisation: Organisation, people: dict[str, User], as_: As
) -> None:
    run, artefact = str(uuid.uuid4()), "ab" * 32
    log.record(
        organisation,
        people["member"],
        "run.approve",
        f"run {run} of demo",
        after={"artifact": artefact, "ratio": 2.471773},
    )
    html = as_("viewer").get("/audit/").content.decode()
    assert f'title="{run}">{run[:8]}</code> of demo' in html and f'title="{artefact}">{artefact[:8]}</code>' in html
    assert "ratio: 2.472" in html
