"""Others' results beside ours, and the winner as a folder: from a report page, by those who may."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable

from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from polymorph_web.accounts.models import User
from polymorph_web.audit.models import Entry
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import PublishedResults, Run
from tests.web import runs

As = Callable[[str], Client]
ROW = {
    "hw": "h200",
    "tp": 8,
    "conc": 16,
    "model": "org/big",
    "framework": "vllm",
    "output_tput_per_gpu": 450.0,
    "median_intvty": 50.0,
}


def send(client: Client, run: Run, content: str, name: str = "theirs <1>.json") -> HttpResponse:
    upload = SimpleUploadedFile(name, content.encode(), "application/json")
    return client.post(reverse("run_publish", args=[run.id]), {"results": upload})


def test_published_results_are_drawn_beside_ours_and_marked(run: Run, as_: As) -> None:
    client = as_("member")
    response = send(client, run, json.dumps([ROW, ROW | {"conc": 32}]))
    assert response.status_code == 302 and response["location"].endswith("#chart-published")
    html = client.get(reverse("run_report", args=[run.id])).content.decode()
    assert "h200 · big · vllm (other hardware)" in html and "theirs &lt;1&gt;.json, 2 results" in html
    assert "Baseline, this machine" in html
    assert Entry.objects.filter(action="published.add", after={"results": 2}).exists()


def test_a_wrong_file_comes_back_with_the_reason(run: Run, as_: As) -> None:
    response = send(as_("member"), run, json.dumps({"model": "no figures"}))
    assert response.status_code == 422
    assert "Result 1 needs output_throughput as a positive number" in response.content.decode()
    assert not PublishedResults.objects.exists()


def test_a_file_is_removed_again(run: Run, as_: As) -> None:
    client = as_("member")
    send(client, run, json.dumps(ROW))
    client.post(reverse("run_unpublish", args=[run.id, PublishedResults.objects.get().id]))
    assert not PublishedResults.objects.exists()
    assert "h200" not in client.get(reverse("run_report", args=[run.id])).content.decode()


def test_a_file_of_another_organisation_stays(run: Run, as_: As, people: dict[str, User]) -> None:
    other = people["stranger"].memberships.get().organisation
    theirs = other.published.create(name="b", points=[], added_by=people["stranger"])
    as_("member").post(reverse("run_unpublish", args=[run.id, theirs.id]))
    assert PublishedResults.objects.filter(id=theirs.id).exists()


def test_the_winner_is_downloaded_ready_to_serve(run: Run, as_: As) -> None:
    response = as_("viewer").get(reverse("run_export", args=[run.id]))
    names = zipfile.ZipFile(io.BytesIO(response.content)).namelist()
    top = f"winner-{str(run.id)[:8]}"
    assert {f"{top}/README.md", f"{top}/serve.sh", f"{top}/{run.winner_hash}/forward.py"} <= set(names)


def test_without_a_winner_there_is_none_to_download(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.without_gain(runs.queued_run(endpoint, people["member"]))
    assert as_("viewer").get(reverse("run_export", args=[run.id])).status_code == 404
    assert (
        reverse("run_export", args=[run.id])
        not in as_("viewer").get(reverse("run_report", args=[run.id])).content.decode()
    )
