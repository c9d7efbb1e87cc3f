"""Where a search looks and its best program of each kind, on the live page and in the report; a resumed run shows the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.test import Client
from django.urls import reverse

from optimizer.report import Facts, build_report
from polymorph_web.accounts.models import User
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import RunEvent
from polymorph_web.runs.state import live_state
from polymorph_web.runs.store import DjangoRunStore
from tests.web import runs

As = Callable[[str], Client]
CELL = {"precision": "coded", "fusion": "whole step", "tile": "wide", "bottleneck": "bytes", "name": "n"}


def foci(worth: float) -> list[dict[str, Any]]:
    row = {
        "focus": "projections",
        "worth": worth,
        "pays": 0.5,
        "turn": 0.8,
        "proposals": 7,
        "kept": 2,
        "why": "1 of <3>",
    }
    return [row, row | {"focus": "cache", "worth": 0.02, "turn": 0.2}]


def elites(digest: str) -> list[dict[str, Any]]:
    elite = {
        "artifact_hash": digest,
        "name": "whole <step>",
        "agent": "ada",
        "ratio": 4.2,
        "ci_low": 4.1,
        "ci_high": 4.3,
    }
    return [elite | {"cell": CELL, "tier": 2}]


def test_the_live_page_shows_the_latest_table_and_grid(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    ledger, winner, _ = runs.searched(run)
    digest = winner.candidate.artifact_hash
    for worth in (0.9, 0.37):
        ledger.stands("foci", foci(worth))
    ledger.stands("elites", elites(digest))
    page = as_("viewer").get(reverse("run", args=[run.id])).content.decode()
    table, grid = page[page.index('id="foci"') : page.index('id="elites"')], page[page.index('id="elites"') :]
    for text in ("Worth at most, end to end", "projections", "37%", "80%", ">7<", ">2<", "1 of &lt;3&gt;"):
        assert text in table, text
    assert "90%" not in table
    for text in ("coded · whole step · wide tile · bytes", "4.20×", "confirmed", "whole &lt;step&gt;"):
        assert text in grid, text
    assert reverse("candidate", args=[run.id, digest]) in grid


def test_a_run_that_has_none_yet_says_so(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    page = as_("viewer").get(reverse("run", args=[run.id])).content.decode()
    assert "Known once the baseline is profiled." in page and "No kind of program was measured yet." in page


def test_what_did_not_change_is_no_event_and_every_change_is(endpoint: Endpoint, people: dict[str, User]) -> None:
    run = runs.queued_run(endpoint, people["member"])
    ledger, _, _ = runs.searched(run)
    for worth in (0.9, 0.9, 0.37):
        ledger.stands("foci", foci(worth))
    assert RunEvent.objects.filter(run=run, kind="foci").count() == 2
    assert live_state(run)["foci"] == foci(0.37) == DjangoRunStore().events(str(run.id))[-1]["payload"]["rows"]


def test_the_report_has_both(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    ledger, winner, baseline = runs.searched(run)
    ledger.stands("foci", foci(0.37))
    ledger.stands("elites", elites(winner.candidate.artifact_hash))
    report = build_report(ledger.config, ledger, Facts({}, {}, {}, baseline.hash), winner, "It was faster.")
    assert report["foci"] == foci(0.37) and report["elites"][0]["cell"]["fusion"] == "whole step"
    run = runs._end(ledger, winner, baseline, "succeeded", "It was faster.")
    page = as_("viewer").get(reverse("run_report", args=[run.id])).content.decode()
    assert "Where the search looks" in page and "37%" in page and "coded · whole step" in page
