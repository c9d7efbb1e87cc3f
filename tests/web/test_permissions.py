"""Who reaches which address. Every route stands in `ROUTES`; every page that is allowed is really rendered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from polymorph_web import urls
from polymorph_web.accounts.models import SignInLink, User
from polymorph_web.rollouts.models import Rollout
from polymorph_web.runs.models import Run
from tests.web.conftest import ROLES

As = Callable[[str], Client]
FROM = {role: ROLES[ROLES.index(role) :] for role in ROLES}


class Route(NamedTuple):
    """Who may: a role and those above it, or `signed_in`, `public`, `staff`. `staff_reads`: staff of no organisation may.

    `owned`: the address names something of an organisation, so a stranger gets 404; else it is about one's own.
    """

    name: str
    method: str
    role: str
    owned: bool = False
    staff_reads: bool = False
    page: bool = True  # answers 200 with a page; otherwise it redirects or is not HTML


ROUTES = (
    Route("fleet", "get", "viewer"),
    Route("health", "get", "public", page=False),
    Route("sign_in", "get", "public"),
    Route("sign_in_link", "get", "public"),
    Route("sign_out", "post", "public", page=False),
    Route("switch_organisation", "post", "viewer", owned=True, page=False),
    Route("endpoint_new", "get", "member"),
    Route("endpoint_preview", "post", "member"),
    Route("endpoint_demo", "post", "member", page=False),
    Route("endpoint", "get", "viewer", owned=True),
    Route("endpoint_try", "post", "viewer", owned=True, page=False),
    Route("rollback", "get", "approver", owned=True),
    Route("optimise", "get", "member", owned=True),
    Route("run", "get", "viewer", owned=True, staff_reads=True),
    Route("run_cancel", "post", "member", owned=True, page=False),
    Route("run_retry", "post", "member", owned=True, page=False),
    Route("run_events", "get", "viewer", owned=True, staff_reads=True, page=False),
    Route("run_board", "get", "viewer", owned=True, staff_reads=True),
    Route("candidate", "get", "viewer", owned=True, staff_reads=True),
    Route("run_report", "get", "viewer", owned=True, staff_reads=True),
    Route("run_report_json", "get", "viewer", owned=True, staff_reads=True, page=False),
    Route("run_report_csv", "get", "viewer", owned=True, staff_reads=True, page=False),
    Route("run_export", "get", "viewer", owned=True, staff_reads=True, page=False),
    Route("run_publish", "post", "member", owned=True, page=False),
    Route("run_unpublish", "post", "member", owned=True, page=False),
    Route("approve", "get", "approver", owned=True),
    Route("rollout", "get", "viewer", owned=True),
    Route("rollout_panel", "get", "viewer", owned=True),
    Route("rollout_action", "post", "approver", owned=True, page=False),
    Route("audit", "get", "viewer"),
    Route("audit_export", "get", "viewer", page=False),
    Route("support", "get", "staff"),
)
BY_NAME = {r.name: r for r in ROUTES}
PRIVATE = tuple(r for r in ROUTES if r.role in ROLES)
OWNED = tuple(r for r in PRIVATE if r.owned)
WRITES = ("optimise", "approve", "rollback")  # pages whose form changes something when it is sent


@pytest.fixture
def call(
    people: dict[str, User], run: Run, rollout: Rollout, demo_model: object, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., HttpResponse]:
    """Calls a route by its name on the fixtures' objects; `method` replaces the route's own."""
    monkeypatch.setattr("polymorph_web.endpoints.services.resolve_model", lambda ref, folder: demo_model)
    slug, run_id = {"slug": "chat"}, {"run_id": run.id}
    arguments: dict[str, dict[str, Any]] = {
        "sign_in_link": {"token": SignInLink.issue(people["viewer"])},
        **{name: slug for name in ("endpoint", "endpoint_try", "rollback", "optimise")},
        **{name: run_id for name in BY_NAME if name.startswith("run") or name == "approve"},
        "run_unpublish": {"run_id": run.id, "results_id": 0},
        "candidate": {"run_id": run.id, "artifact_hash": run.winner_hash},
        "rollout": {"rollout_id": rollout.id},
        "rollout_panel": {"rollout_id": rollout.id},
        "rollout_action": {"rollout_id": rollout.id, "action": "pause"},
        "audit_export": {"form": "csv"},
    }
    sent = {
        "switch_organisation": {"organisation": "acme"},
        "endpoint_preview": {"traffic_source": "preset", "preset": "demo", "concurrency": 2},
        "endpoint_try": {"prompt": "Hi", "max_tokens": "4"},
    }
    results = b'{"model_id": "m", "max_concurrency": 4, "output_throughput": 71.0, "median_tpot": 0.05}'

    def call(client: Client, name: str, method: str = "") -> HttpResponse:
        url = reverse(name, kwargs=arguments.get(name, {}))
        given = {"results": SimpleUploadedFile("a.json", results)} if name == "run_publish" else sent.get(name, {})
        return getattr(client, method or BY_NAME[name].method)(url, given)

    return call


def test_every_address_has_a_row() -> None:
    assert sorted(p.name for p in urls.urlpatterns) == sorted(r.name for r in ROUTES)


@pytest.mark.parametrize("route", PRIVATE, ids=lambda r: r.name)
def test_the_roles_that_may_do(route: Route, as_: As, call: Callable[..., HttpResponse]) -> None:
    for role in FROM[route.role]:
        response = call(as_(role), route.name)
        assert response.status_code == 200 if route.page else response.status_code in (200, 302), role
        if route.page:
            assert response.content.strip().endswith(b">") and b"</" in response.content


@pytest.mark.parametrize("role", ROLES[:-1])
def test_the_roles_below_are_refused(role: str, as_: As, call: Callable[..., HttpResponse]) -> None:
    for route in PRIVATE:
        if role not in FROM[route.role]:
            response = call(as_(role), route.name)
            assert response.status_code == 403, route.name
            assert f"you are {role} of Acme &amp; Söhne" in response.content.decode()


@pytest.mark.parametrize("somebody", ["stranger", "loner"])
def test_a_stranger_finds_nothing_there(somebody: str, as_: As, call: Callable[..., HttpResponse]) -> None:
    client = as_(somebody)
    assert {r.name: call(client, r.name).status_code for r in OWNED} == {r.name: 404 for r in OWNED}


@pytest.mark.parametrize("name", ["audit", "audit_export", "fleet"])
def test_a_strangers_own_pages_show_nothing_of_others(name: str, as_: As, call: Callable[..., HttpResponse]) -> None:
    response = call(as_("stranger"), name)
    assert response.status_code == 200
    assert not any(word in response.content for word in (b"prod", b"/e/chat/", b"Acme", b"run.approve"))


def test_who_belongs_to_no_organisation_has_no_pages(as_: As, call: Callable[..., HttpResponse]) -> None:
    routes, client = [r for r in PRIVATE if not r.owned], as_("loner")
    assert {r.name: call(client, r.name).status_code for r in routes} == {r.name: 404 for r in routes}


def test_nobody_signed_in_is_sent_to_sign_in(as_: As, call: Callable[..., HttpResponse]) -> None:
    client = as_("anonymous")
    for route in (*PRIVATE, BY_NAME["support"]):
        response = call(client, route.name)
        if route.name == "endpoint_try":  # answers a script
            assert response.status_code == 401
        else:
            assert response.status_code == 302, route.name
            assert response["location"].startswith(reverse("sign_in"))


def test_public_addresses_need_no_sign_in(as_: As, call: Callable[..., HttpResponse]) -> None:
    client = as_("anonymous")
    found = {r.name: call(client, r.name).status_code for r in ROUTES if r.role == "public"}
    assert found == {"health": 200, "sign_in": 200, "sign_in_link": 200, "sign_out": 302}


def test_staff_read_runs_and_change_nothing(as_: As, call: Callable[..., HttpResponse]) -> None:
    client = as_("staff")
    expected = {r.name: 200 if r.staff_reads else 404 for r in OWNED}
    assert {r.name: call(client, r.name).status_code for r in OWNED} == expected


@pytest.mark.parametrize(("somebody", "status"), [("staff", 404), ("stranger", 404), ("viewer", 403)])
def test_forms_of_others_cannot_be_sent(
    somebody: str, status: int, as_: As, call: Callable[..., HttpResponse], run: Run
) -> None:
    client, before = as_(somebody), (Run.objects.count(), Rollout.objects.count())
    for name in WRITES:
        assert call(client, name, "post").status_code == status, name
    assert (Run.objects.count(), Rollout.objects.count()) == before


def test_what_changes_something_cannot_be_got(as_: As, call: Callable[..., HttpResponse]) -> None:
    client, posts = as_("admin"), [r.name for r in ROUTES if r.method == "post"]
    assert {name: call(client, name, "get").status_code for name in posts} == dict.fromkeys(posts, 405)


def test_what_changes_something_needs_the_forms_token(
    people: dict[str, User], call: Callable[..., HttpResponse]
) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(people["admin"])
    posts = [*WRITES, *(r.name for r in ROUTES if r.method == "post")]
    assert {name: call(client, name, "post").status_code for name in posts} == dict.fromkeys(posts, 403)


def test_every_tab_of_an_endpoint_renders(as_: As, rollout: Rollout) -> None:
    client = as_("viewer")
    for tab in ("overview", "performance", "versions", "runs", "activity", "nonsense"):
        response = client.get("/e/chat/", {"tab": tab})
        assert response.status_code == 200, tab
        assert "Chat &lt;prod&gt;" in response.content.decode()


def test_support_is_for_staff_alone(as_: As, call: Callable[..., HttpResponse]) -> None:
    found = {somebody: call(as_(somebody), "support").status_code for somebody in (*ROLES, "stranger", "staff")}
    assert found == dict.fromkeys((*ROLES, "stranger"), 404) | {"staff": 200}
