"""Starting, watching, stopping and reading runs."""

from __future__ import annotations

import csv
import io
import json
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from django.urls import reverse

from optimizer.store import RunStore
from polymorph_web.accounts.models import User
from polymorph_web.audit.models import Entry
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs import services, tasks
from polymorph_web.runs.models import MAX_ATTEMPTS, Run, RunRecord
from polymorph_web.runs.store import DjangoRunStore
from tests.web import runs

As = Callable[[str], Client]
Rings = Callable[[], list[Any]]
FORM = {"budget_minutes": "5", "tolerance": "near", "foci": ["attention", "cache"], "seed": "3"}


@pytest.fixture
def queued(endpoint: Endpoint, people: dict[str, User]) -> Run:
    return runs.queued_run(endpoint, people["member"])


@pytest.fixture(autouse=True)
def _nothing_rung_yet() -> None:
    tasks._rung.clear()


def page(client: Client, name: str, run: Run, **more: Any) -> str:
    response = client.get(reverse(name, kwargs={"run_id": run.id, **more}))
    assert response.status_code == 200
    return response.content.decode()


def test_starting_rings_with_the_runs_id_and_nothing_else(
    endpoint: Endpoint, as_: As, rings: Rings, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks() as callbacks:
        response = as_("member").post("/e/chat/optimise/", FORM)
        assert rings() == [], "the row must be there before anybody is rung"
    (run,) = Run.objects.all()
    assert response["location"] == reverse("run", args=[run.id])
    callbacks[0]()
    assert rings() == [[[str(run.id)], {}]]


def test_what_was_chosen_is_what_the_worker_reads(endpoint: Endpoint, as_: As) -> None:
    as_("member").post("/e/chat/optimise/", FORM)
    config = Run.objects.get().config
    assert (config["budget_s"], config["foci"], config["seed"]) == (300, ["attention", "cache"], 3)
    assert (config["model"], config["traffic"]) == (endpoint.model_path, endpoint.traffic)
    entry = Entry.objects.get(action="run.start")
    assert entry.actor_name == "member" and entry.after["budget_s"] == 300


def test_lower_precision_is_offered_with_what_it_means(endpoint: Endpoint, as_: As) -> None:
    assert "outputs change, verification bounds by how much" in as_("member").get("/e/chat/optimise/").content.decode()
    as_("member").post("/e/chat/optimise/", FORM | {"tolerance": "quantised"})
    assert Run.objects.get().config["tolerance"] == "quantised"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget_minutes": "0.1"}, "greater than or equal to 0.5"),
        ({"budget_minutes": "soon"}, "Enter a number"),
        ({"tolerance": "sloppy"}, "sloppy is not one of the available choices"),
        ({"foci": []}, "This field is required"),
        ({"seed": "-1"}, "greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_said_beside_its_field(endpoint: Endpoint, as_: As, change: dict[str, Any], said: str) -> None:
    response = as_("member").post("/e/chat/optimise/", FORM | change)
    assert response.status_code == 200
    assert said in response.content.decode()
    assert not Run.objects.exists()


def test_a_second_start_shows_the_run_that_goes_on(queued: Run, as_: As, rings: Rings) -> None:
    response = as_("admin").post("/e/chat/optimise/", FORM, follow=True)
    assert response.redirect_chain[-1][0] == reverse("run", args=[queued.id])
    assert "is being optimised already" in response.content.decode()
    assert Run.objects.count() == 1


def test_two_clicks_at_the_same_moment_start_one_run(
    transactional_db: None, endpoint: Endpoint, people: dict[str, User], rings: Rings
) -> None:
    chosen = {"budget_minutes": 5, "tolerance": "near", "foci": ["cache"]}
    start, outcomes = threading.Barrier(3), []

    def click() -> None:
        start.wait()
        try:
            outcomes.append(services.start_run(endpoint, people["member"], chosen).id)
        except services.Busy as busy:
            outcomes.append(busy.run.id)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=click) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = Run.objects.get()
    assert outcomes == [run.id] * 3
    assert rings() == [[[str(run.id)], {}]]


def test_a_queued_run_is_cancelled_at_once(queued: Run, as_: As) -> None:
    as_("member").post(reverse("run_cancel", args=[queued.id]))
    queued.refresh_from_db()
    assert (queued.state, queued.reason) == ("cancelled", "Cancelled before it started.")
    assert DjangoRunStore().claim(str(queued.id), "w", 60) is None


def test_a_running_run_is_stopped_by_its_worker(queued: Run, as_: As) -> None:
    runs.searched(queued)
    as_("member").post(reverse("run_cancel", args=[queued.id]))
    queued.refresh_from_db()
    assert (queued.state, queued.cancel_requested) == ("running", True)
    assert DjangoRunStore().cancelled(str(queued.id))


def test_an_ended_run_is_repeated_with_the_same_choices(
    run: Run, as_: As, rings: Rings, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        response = as_("member").post(reverse("run_retry", args=[run.id]))
    again = Run.objects.exclude(id=run.id).get()
    assert response["location"] == reverse("run", args=[again.id])
    assert again.config == run.config | {"run_id": str(again.id)}
    assert rings() == [[[str(again.id)], {}]]


def test_a_run_that_goes_on_is_not_repeated(queued: Run, as_: As) -> None:
    as_("member").post(reverse("run_retry", args=[queued.id]))
    assert Run.objects.count() == 1


def test_a_retry_does_not_run_beside_another_run(run: Run, queued: Run, as_: As) -> None:
    response = as_("member").post(reverse("run_retry", args=[run.id]))
    assert response["location"] == reverse("run", args=[queued.id])
    assert Run.objects.count() == 2


def test_a_lost_worker_is_noticed_and_another_is_rung(queued: Run, rings: Rings) -> None:
    assert DjangoRunStore().claim(str(queued.id), "lost", -1)
    assert tasks.reap() == 1
    assert rings() == [[[str(queued.id)], {}]]
    assert tasks.reap() == 0, "once rung, the queue is given time"


def test_a_worker_that_was_killed_is_noticed_before_its_lease_ends(queued: Run, rings: Rings) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert DjangoRunStore().claim(str(queued.id), f"{socket.gethostname()}:{ended.pid}:1", 60)
    assert tasks.reap() == 1
    assert rings() == [[[str(queued.id)], {}]]
    assert DjangoRunStore().claim(str(queued.id), "next", 60)


@pytest.mark.parametrize("owner", [tasks.worker_name(), "another-machine:999999999:1", "conductor"])
def test_a_worker_that_may_be_alive_keeps_its_run(queued: Run, rings: Rings, owner: str) -> None:
    assert DjangoRunStore().claim(str(queued.id), owner, 60)
    assert tasks.reap() == 0
    assert rings() == [] and DjangoRunStore().claim(str(queued.id), "next", 60) is None


def test_a_held_run_is_left_alone(queued: Run, rings: Rings) -> None:
    assert DjangoRunStore().claim(str(queued.id), "alive", 60)
    assert tasks.reap() == 0
    assert rings() == []


def test_a_run_whose_ring_got_lost_is_rung_again(queued: Run, rings: Rings) -> None:
    assert tasks.reap() == 0, "its own ring may be on the way"
    Run.objects.filter(id=queued.id).update(created=queued.created.replace(year=2020))
    assert tasks.reap() == 1
    assert rings() == [[[str(queued.id)], {}]]


def test_a_run_that_lost_every_worker_fails_and_says_so(queued: Run, rings: Rings, as_: As) -> None:
    for n in range(MAX_ATTEMPTS):
        assert DjangoRunStore().claim(str(queued.id), f"lost-{n}", -1)
    tasks.reap()
    queued.refresh_from_db()
    assert queued.state == "failed" and queued.finished is not None
    assert f"The worker was lost {MAX_ATTEMPTS} times" in queued.reason
    assert rings() == []
    assert queued.reason in page(as_("viewer"), "run", queued)
    assert Entry.objects.get(action="run.failed").reason == queued.reason
    last = DjangoRunStore().events(str(queued.id))[-1]
    assert last["kind"] == "finished" and last["payload"] == {"outcome": "failed", "reason": queued.reason}
    assert queued.attempt == MAX_ATTEMPTS


def test_a_ring_for_a_held_run_does_nothing(queued: Run) -> None:
    assert DjangoRunStore().claim(str(queued.id), "alive", 60)
    tasks.optimise(str(queued.id))
    queued.refresh_from_db()
    assert (queued.state, queued.lease_owner, queued.attempt) == ("running", "alive", 1)


def test_a_run_that_cannot_begin_ends_with_a_sentence(queued: Run, as_: As) -> None:
    Run.objects.filter(id=queued.id).update(config=queued.config | {"dtype": "int3"})
    tasks.optimise(str(queued.id))
    queued.refresh_from_db()
    assert queued.state == "failed"
    assert "dtype &#x27;int3&#x27; is not served" in page(as_("viewer"), "run", queued)
    assert Entry.objects.filter(action="run.failed", actor=None).count() == 1


def test_a_fault_in_the_search_ends_the_run_not_the_worker(queued: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, config: object, store: RunStore) -> None: ...

        def run(self, lease: object) -> None:
            raise ZeroDivisionError("by zero")

    monkeypatch.setattr("optimizer.search.Search", Broken)
    tasks.optimise(str(queued.id))
    queued.refresh_from_db()
    assert queued.state == "failed" and "ZeroDivisionError: by zero" in queued.reason


def state_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="run-state" type="application/json">(.*?)</script>', html, re.S)
    assert found
    return dict(json.loads(found[1]))


def test_the_live_page_holds_what_happened_so_far(queued: Run, as_: As) -> None:
    runs.searched(queued)
    queued.refresh_from_db()
    html = page(as_("viewer"), "run", queued)
    state = state_of(html)
    assert state["last_seq"] == queued.last_seq > 10
    assert state["run"]["state"] == "running"
    rows = {c["name"]: c for c in state["candidates"]}
    assert (rows["fused gate and up"]["tier"], rows["fused gate and up"]["ratio"]) == (2, 1.66)
    assert rows["fused gate and up"]["predicted"] == 1.4
    assert (rows["does not compile"]["state"], rows["does not compile"]["failure"]) == (
        "failed",
        "g++ refused <vector>.",
    )
    assert rows["pages of <32>"]["tier"] is None
    assert state["incumbent"]["name"] == "fused gate and up"
    assert len(state["checks"]) == 3
    assert "pages of &lt;32&gt;" in html and "<32>" not in html.replace("\\u003C32\\u003E", "")
    assert "here&lt;/b&gt;" in html


def test_a_queued_run_shows_how_many_are_ahead(queued: Run, endpoint: Endpoint, people: Any, as_: As) -> None:
    second = runs.queued_run(endpoint, people["member"])
    response = as_("viewer").get(reverse("run", args=[second.id]))
    assert response.context["queue_position"] == 1


def test_events_after_a_number(queued: Run, as_: As) -> None:
    runs.searched(queued)
    url = reverse("run_events", args=[queued.id])
    every = as_("viewer").get(url).json()["events"]
    assert [e["seq"] for e in every] == list(range(1, len(every) + 1))
    assert as_("viewer").get(url, {"after": "5"}).json()["events"] == every[5:]
    assert as_("viewer").get(url, {"after": "-1; drop"}).json()["events"] == every


def test_a_candidates_page_shows_its_source_against_the_baseline(run: Run, as_: As) -> None:
    html = page(as_("viewer"), "candidate", run, artifact_hash=run.winner_hash)
    assert "fused gate and up" in html
    assert "größer &amp; &lt;faster&gt;" in html, "source is escaped"
    assert "1.66 times the baseline" in html
    assert "poison" in html and "KL" in html and "caught" in html


@pytest.mark.parametrize("query", [{"diff": "split"}, {"against": "parent"}, {"diff": "x", "against": "y"}])
def test_the_diff_can_be_looked_at_otherwise(run: Run, as_: As, query: dict[str, str]) -> None:
    url = reverse("candidate", args=[run.id, run.winner_hash])
    response = as_("viewer").get(url, query)
    assert response.status_code == 200
    assert response.context["diff"][0].name == "forward.py" and response.context["diff"][0].rows


def test_a_candidate_that_failed_says_why(run: Run, as_: As) -> None:
    lost = RunRecord.objects.get(run=run, kind="candidate", payload__name="does not compile")
    assert "g++ refused &lt;vector&gt;." in page(as_("viewer"), "candidate", run, artifact_hash=lost.artifact_hash)


def test_a_candidate_whose_parent_is_gone_still_shows(run: Run, as_: As) -> None:
    record = RunRecord.objects.get(run=run, kind="candidate", artifact_hash=run.winner_hash)
    record.payload["parent"] = "f" * 64
    record.save()
    url = reverse("candidate", args=[run.id, run.winner_hash]) + "?against=parent"
    assert as_("viewer").get(url).status_code == 200


@pytest.mark.parametrize("digest", ["f" * 64, "short", "%2e%2e"])
def test_an_unknown_candidate_is_not_found(run: Run, as_: As, digest: str) -> None:
    assert as_("viewer").get(f"/runs/{run.id}/candidates/{digest}/").status_code == 404


def test_the_report_page_says_what_got_faster(run: Run, as_: As) -> None:
    html = page(as_("approver"), "run_report", run)
    ratio = run.report["speedup"]["ratio"]
    assert f"{ratio:.2f}" in html
    assert "2 of 2 checks passed" in html
    assert "a note of the measurement" in html.lower()
    assert reverse("approve", args=[run.id]) in html
    assert reverse("approve", args=[run.id]) not in page(as_("viewer"), "run_report", run)


def test_a_live_page_shows_how_predictions_fared_and_what_they_stand_on(
    endpoint: Endpoint, people: dict[str, User], as_: As
) -> None:
    run = runs.queued_run(endpoint, people["member"])
    ledger, winner, _ = runs.searched(run)
    html = page(as_("viewer"), "run", run)
    assert "corrected by 3 measurements of this mechanism" in html
    said = "Tier 2, whole model: off by 16% at the median so far; 0 of 1 measured slower than predicted."
    assert said in html.partition('id="predictions"')[2]
    again = replace(runs.measured(winner.candidate, 1, "b"), id="kept-1v2", visit=2, predicted=9.0)
    ledger.experiment(winner.candidate, again)
    assert said.replace("Tier 2, whole model", "Tier 1, few layers") in page(as_("viewer"), "run", run)


def test_the_report_page_accounts_for_the_search(run: Run, as_: As) -> None:
    html = page(as_("viewer"), "run_report", run)
    assert (
        "Tier 1 kept 1 of 1 (100%); all layers confirmed 1 of 1 (100%)." in html
        and "One look and what was confirmed" in html
    )
    assert "fused gate and up" in html.partition('id="accounting"')[2]
    Run.objects.filter(id=run.id).update(report={k: v for k, v in run.report.items() if k != "accounting"})
    assert 'id="accounting"' not in page(as_("viewer"), "run_report", run), "reports of earlier versions have none"


def test_a_run_without_gain_says_that_nothing_changes(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.without_gain(runs.queued_run(endpoint, people["member"]))
    for name in ("run", "run_report"):
        html = page(as_("approver"), name, run)
        assert reverse("approve", args=[run.id]) not in html
    assert "the endpoint stays as it is" in html
    assert as_("viewer").get("/").status_code == 200


def test_a_run_without_a_report_leads_back_to_its_page(queued: Run, as_: As) -> None:
    client = as_("viewer")
    assert client.get(reverse("run_report", args=[queued.id]))["location"] == reverse("run", args=[queued.id])
    for name in ("run_report_json", "run_report_csv"):
        assert client.get(reverse(name, args=[queued.id])).status_code == 404


def test_the_report_is_downloaded_as_it_is_stored(run: Run, as_: As) -> None:
    response = as_("viewer").get(reverse("run_report_json", args=[run.id]))
    assert response.json() == run.report
    assert "attachment" in response["content-disposition"]


def test_every_raw_sample_is_downloaded(run: Run, as_: As) -> None:
    response = as_("viewer").get(reverse("run_report_csv", args=[run.id]))
    rows = list(csv.DictReader(io.StringIO(response.content.decode())))
    assert [r["side"] for r in rows] == ["baseline"] * 12 + ["winner"] * 12
    assert {r["osl"] for r in rows} == {"20"} and all(float(r["ttft_s"]) > 0 for r in rows)


def test_an_unknown_run_is_not_found(as_: As) -> None:
    assert as_("viewer").get(reverse("run", args=[uuid.uuid4()])).status_code == 404


def test_the_fleet_says_what_waits_for_a_person(run: Run, as_: As) -> None:
    html = as_("viewer").get("/").content.decode()
    assert "a faster version waits for approval" in html


def test_a_failed_run_is_told_on_the_fleet(queued: Run, as_: As) -> None:
    runs.failed(queued, "No disk space was left.")
    assert "No disk space was left." in as_("viewer").get("/").content.decode()


def test_leases_are_judged_by_the_clock_of_the_row(queued: Run, rings: Rings) -> None:
    assert DjangoRunStore().claim(str(queued.id), "alive", 60)
    Run.objects.filter(id=queued.id).update(lease_expires=time.time() - 1)
    assert tasks.reap() == 1
