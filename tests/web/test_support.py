"""Staff read every organisation's run histories, and nothing more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from polymorph_web.accounts.models import Organisation, User
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import Run
from tests.web import runs

As = Callable[[str], Client]


@pytest.fixture
def theirs(run: Run, people: dict[str, User]) -> Run:
    """A failed run of another organisation."""
    endpoint = Endpoint.objects.get()
    other = Endpoint.objects.create(
        organisation=Organisation.objects.get(slug="other"),
        slug="other-chat",
        name="Other chat",
        model_path=endpoint.model_path,
        traffic=endpoint.traffic,
        created_by=people["stranger"],
    )
    return runs.failed(runs.queued_run(other, people["stranger"]), "The compiler was <lost>.")


def test_staff_see_the_runs_of_all(run: Run, theirs: Run, as_: As) -> None:
    response = as_("staff").get("/support/")
    assert {r.id for r in response.context["runs"]} == {run.id, theirs.id}
    html = response.content.decode()
    assert "The compiler was &lt;lost&gt;." in html and "Acme &amp; Söhne" in html
    assert reverse("run", args=[theirs.id]) in html


def test_staff_without_an_organisation_land_there(as_: As) -> None:
    assert as_("staff").get("/")["location"] == "/support/"


@pytest.mark.parametrize("q", ["other-chat", "Acme", "failed", "compiler lost", "nothing at all"])
def test_runs_are_searched(q: str, run: Run, theirs: Run, as_: As) -> None:
    expected = {"Acme": {run.id}, "nothing at all": set()}.get(q, {theirs.id})
    response = as_("staff").get("/support/", {"q": q})
    assert {r.id for r in response.context["runs"]} == expected


def test_a_run_is_found_by_its_id(run: Run, theirs: Run, as_: As) -> None:
    for text in (str(run.id), str(run.id)[:8]):
        response = as_("staff").get("/support/", {"q": text})
        assert [r.id for r in response.context["runs"]] == [run.id]


def test_the_pages_of_a_run_offer_staff_nothing_to_do(run: Run, as_: As) -> None:
    client = as_("staff")
    for name in ("run", "run_report"):
        html = client.get(reverse(name, args=[run.id])).content.decode()
        for action in ("run_cancel", "run_retry", "approve"):
            assert reverse(action, args=[run.id]) not in html


def test_a_live_run_offers_staff_nothing_to_do(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    html = as_("staff").get(reverse("run", args=[run.id])).content.decode()
    assert reverse("run_cancel", args=[run.id]) not in html
    assert reverse("run_cancel", args=[run.id]) in as_("member").get(reverse("run", args=[run.id])).content.decode()


def test_a_failed_run_offers_a_retry_to_members_alone(theirs: Run, as_: As) -> None:
    url, retry = reverse("run", args=[theirs.id]), reverse("run_retry", args=[theirs.id])
    assert retry not in as_("staff").get(url).content.decode()
    assert retry in as_("stranger").get(url).content.decode()
