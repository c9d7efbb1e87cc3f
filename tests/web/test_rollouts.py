"""Deciding on a result, the canary and its ends, rolling back: state machine, pages and what the gateway is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from polymorph_web.accounts.models import Organisation, User
from polymorph_web.audit.models import Entry
from polymorph_web.endpoints.models import Endpoint, RequestShape, Version
from polymorph_web.rollouts import services
from polymorph_web.rollouts.models import Decision, Rollout
from polymorph_web.runs.models import Run
from tests.web import runs
from tests.web.gateway import Gateway, server

As = Callable[[str], Client]
SOAK = 20


def decide(client: Client, run: Run, **changes: str) -> Any:
    form = {"action": "approve", "reason": "Verified.", "artifact_hash": run.winner_hash} | changes
    return client.post(reverse("approve", args=[run.id]), form)


def answered(rollout: Rollout, role: str, n: int = SOAK, token_s: float = 0.01, status: int = 200) -> None:
    """`n` requests that the gateway recorded for one side since the canary began."""
    at, version = time.time(), "v1" if role == "canary" else "baseline"
    RequestShape.objects.bulk_create(
        RequestShape(
            endpoint=rollout.endpoint, ts=at + i / 1000, version_id=version, role=role, isl=10, osl=20,
            ttft_s=0.05, e2el_s=0.05 + 19 * token_s, status=status,
        )
        for i in range(n)
    )  # fmt: skip


def look(rollout: Rollout) -> Rollout:
    services.advance(rollout)
    rollout.refresh_from_db()
    return rollout


def both(gateway: Gateway, rollout: Rollout, **canary: Any) -> None:
    """Both engines run, the canary as described."""
    stable, digest = rollout.previous.artifact_hash, rollout.version.artifact_hash
    gateway.serves(server("stable", stable), server("canary", digest, **canary))


@pytest.fixture
def ready(rollout: Rollout, gateway: Gateway) -> Rollout:
    both(gateway, rollout)
    answered(rollout, "stable")
    answered(rollout, "canary")
    return look(rollout)


# Deciding


def test_an_approval_starts_a_canary_of_exactly_what_was_seen(run: Run, as_: As, gateway: Gateway) -> None:
    response = decide(as_("approver"), run)
    rollout = Rollout.objects.get()
    assert response["location"] == reverse("rollout", args=[rollout.id])
    (plan,) = gateway.plans
    assert plan["generation"] == rollout.generation == 1
    shares = {v["role"]: (v["version_id"], v["artifact_hash"], v["share"]) for v in plan["versions"]}
    baseline = Version.objects.get(number=0).artifact_hash
    assert shares == {"stable": ("baseline", baseline, 0.75), "canary": ("v1", run.winner_hash, 0.25)}
    assert [e.action for e in Entry.objects.order_by("seq")][-2:] == ["run.approve", "rollout.canary"]


def test_what_is_served_does_not_change_with_the_approval(run: Run, endpoint: Endpoint, as_: As, gateway: Any) -> None:
    decide(as_("approver"), run)
    endpoint.refresh_from_db()
    assert endpoint.serving is not None and endpoint.serving.number == 0


@pytest.mark.parametrize("reason", ["", "  ", "ok"])
@pytest.mark.parametrize("action", ["approve", "decline"])
def test_a_decision_needs_a_reason(run: Run, as_: As, gateway: Gateway, action: str, reason: str) -> None:
    response = decide(as_("approver"), run, action=action, reason=reason)
    assert response.status_code == 200 and "reason" in response.context["form"].errors
    assert not Decision.objects.exists() and not gateway.plans


def test_who_started_a_run_does_not_approve_it(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.succeeded(runs.queued_run(endpoint, people["approver"]))
    response = decide(as_("approver"), run)
    assert "Who started a run may not decide on its result here" in response.content.decode()
    assert not Decision.objects.exists()


def test_unless_the_organisation_allows_it(
    endpoint: Endpoint, people: dict[str, User], as_: As, gateway: Gateway
) -> None:
    Organisation.objects.filter(slug="acme").update(self_approval=True)
    run = runs.succeeded(runs.queued_run(endpoint, people["approver"]))
    decide(as_("approver"), run)
    assert Decision.objects.get().approved and Rollout.objects.exists()


def test_a_result_that_changed_under_the_reader_is_not_approved(run: Run, as_: As, gateway: Gateway) -> None:
    response = decide(as_("approver"), run, artifact_hash="e" * 64)
    assert "The result changed while you looked at it" in response.content.decode()
    assert not Decision.objects.exists() and not gateway.plans


def test_an_approval_is_void_once_the_winner_is_another(decision: Decision, people: dict[str, User]) -> None:
    decision.run.report["winner"]["artifact_hash"] = "e" * 64
    decision.run.save()
    with pytest.raises(services.Refused, match="void"):
        services.release(decision, people["approver"])


def test_declining_leaves_the_endpoint_alone(run: Run, as_: As, gateway: Gateway) -> None:
    response = decide(as_("approver"), run, action="decline", reason="Too risky now.")
    assert response["location"] == reverse("run_report", args=[run.id])
    assert not Rollout.objects.exists() and not gateway.plans
    assert Entry.objects.get(action="run.decline").reason == "Too risky now."
    assert "Too risky now." in as_("viewer").get(response["location"]).content.decode()
    assert "waits for approval" not in as_("viewer").get("/").content.decode()


def test_a_result_is_decided_on_once(run: Run, as_: As, gateway: Gateway) -> None:
    decide(as_("approver"), run, action="decline")
    assert "decided on already" in decide(as_("admin"), run).content.decode()
    assert Decision.objects.count() == 1 and not gateway.plans


def test_a_run_without_a_winner_cannot_be_approved(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.without_gain(runs.queued_run(endpoint, people["member"]))
    response = decide(as_("approver"), run, artifact_hash="e" * 64)
    assert "There is no verified winner to decide on" in response.content.decode()


@pytest.mark.parametrize("down", ["no gateway", "it refuses"])
def test_without_the_gateway_an_approval_can_be_given_again(
    run: Run, as_: As, gateway: Gateway, settings: Any, down: str
) -> None:
    """Approved and not released would leave a result that nobody can release."""
    if down == "it refuses":
        gateway.refuse = "The disk of the gateway is full."
        said = "The disk of the gateway is full."
    else:
        up, settings.GATEWAY_URL = settings.GATEWAY_URL, "http://127.0.0.1:9"
        said = "cannot be reached. Is it running?"
    assert said in decide(as_("approver"), run).content.decode()
    assert not Rollout.objects.exists() and not Version.objects.filter(number=1).exists()
    assert Endpoint.objects.get().generation == 0
    gateway.refuse = ""
    if down == "no gateway":
        settings.GATEWAY_URL = up
    assert decide(as_("approver"), run).status_code == 302
    assert Rollout.objects.get().state == "canary"


def test_the_page_of_a_decision_shows_gates_and_plan(run: Run, as_: As) -> None:
    html = as_("approver").get(reverse("approve", args=[run.id])).content.decode()
    assert "95% confidence interval lies above 1" in html and "25% of the requests" in html
    assert run.winner_hash in html


# The canary


def test_no_data_is_a_hold_and_never_a_pass(rollout: Rollout, gateway: Gateway, as_: As) -> None:
    both(gateway, rollout)
    assert look(rollout).state == "canary"
    assert "0 of 20 requests" in rollout.hold
    assert "0 of 20 requests" in as_("viewer").get("/").content.decode()
    answered(rollout, "canary", SOAK)
    assert "0 of 20 requests" in look(rollout).hold, "one side alone is nothing to compare with"


def test_a_canary_that_starts_is_waited_for(rollout: Rollout, gateway: Gateway) -> None:
    both(gateway, rollout, state="starting")
    assert look(rollout).hold == "The canary's engine is starting."


def test_a_good_canary_is_promoted_and_confirmed_by_its_hash(
    ready: Rollout, gateway: Gateway, as_: As, endpoint: Endpoint
) -> None:
    assert ready.state == "ready"
    as_("approver").post(reverse("rollout_action", args=[ready.id, "promote"]))
    ready.refresh_from_db()
    assert ready.state == "promoting"
    assert [(v["artifact_hash"], v["share"]) for v in gateway.plans[-1]["versions"]] == [
        (ready.version.artifact_hash, 1.0)
    ]
    gateway.serves(server("stable", ready.previous.artifact_hash))
    assert look(ready).state == "promoting", "another hash answers still"
    gateway.serves(server("stable", ready.version.artifact_hash))
    assert look(ready).state == "done"
    endpoint.refresh_from_db()
    assert endpoint.serving == ready.version
    confirmed = Entry.objects.get(action="serving.confirmed")
    assert (confirmed.before["version"], confirmed.after["version"]) == ("baseline", "v1")
    assert confirmed.after["artifact"] == ready.version.artifact_hash and confirmed.actor is None
    assert as_("viewer").get(reverse("rollout", args=[ready.id])).status_code == 200


def test_a_canary_that_is_not_ready_cannot_be_promoted(rollout: Rollout, as_: As, gateway: Gateway) -> None:
    response = as_("approver").post(reverse("rollout_action", args=[rollout.id, "promote"]), follow=True)
    assert "A rollout that is canary cannot promote now." in response.content.decode()
    assert len(gateway.plans) == 1


def test_an_older_plan_confirms_nothing(ready: Rollout, gateway: Gateway, people: dict[str, User]) -> None:
    services.act(ready, "promote", people["approver"])
    gateway.serves(server("stable", ready.version.artifact_hash))
    gateway.status["applied_generation"] = ready.generation - 1
    assert look(ready).state == "promoting"


def returned(rollout: Rollout, gateway: Gateway, why: str) -> None:
    """The product asked for the version before, says why, and ends the rollout once that answers."""
    assert rollout.state == "returning" and why in rollout.note
    assert [v["artifact_hash"] for v in gateway.plans[-1]["versions"]] == [rollout.previous.artifact_hash]
    assert why in Entry.objects.get(action="rollout.breach").reason
    gateway.serves(server("stable", rollout.previous.artifact_hash))
    assert look(rollout).state == "rolled_back"
    assert Endpoint.objects.get().serving == rollout.previous
    assert why in Entry.objects.get(action="rollout.rolled_back").reason


@pytest.mark.parametrize("state", ["canary", "ready", "paused"])
def test_a_slower_canary_goes_back_by_itself(state: str, rollout: Rollout, gateway: Gateway) -> None:
    Rollout.objects.filter(id=rollout.id).update(state=state)
    rollout.refresh_from_db()
    both(gateway, rollout)
    answered(rollout, "stable")
    answered(rollout, "canary", token_s=0.02)
    returned(look(rollout), gateway, "TPOT of the canary is 2.00 times")


def test_a_canary_that_fails_requests_goes_back_by_itself(rollout: Rollout, gateway: Gateway) -> None:
    both(gateway, rollout)
    answered(rollout, "stable")
    answered(rollout, "canary", 3, status=500)
    returned(look(rollout), gateway, "The canary failed 3 of 3 requests")


@pytest.mark.parametrize(("state", "starts"), [("failed", 1), ("ready", services.CANARY_RESTARTS + 1)])
def test_a_canary_whose_server_crashes_goes_back_by_itself(
    rollout: Rollout, gateway: Gateway, state: str, starts: int
) -> None:
    both(gateway, rollout, state=state, starts=starts)
    returned(look(rollout), gateway, "The canary's server crashed.")


def test_a_stable_server_that_fails_is_not_blamed_on_the_canary(rollout: Rollout, gateway: Gateway) -> None:
    stable = server("stable", rollout.previous.artifact_hash, state="failed")
    gateway.serves(stable, server("canary", rollout.version.artifact_hash), error="the stable server ended")
    look(rollout)
    gateway.status["error"] = ""
    returned(rollout, gateway, "The stable version's server failed beside the canary")


def test_a_canary_that_cannot_be_built_goes_back_by_itself(rollout: Rollout, gateway: Gateway) -> None:
    gateway.serves(server("stable", rollout.previous.artifact_hash), error="artefact damaged")
    look(rollout)
    gateway.status["error"] = ""
    returned(rollout, gateway, "The canary could not be served: artefact damaged")


def test_a_canary_that_never_starts_goes_back_by_itself(rollout: Rollout, gateway: Gateway) -> None:
    Rollout.objects.filter(id=rollout.id).update(created=timezone.now() - timedelta(hours=1))
    rollout.refresh_from_db()
    both(gateway, rollout, state="starting")
    returned(look(rollout), gateway, "did not start within")


def test_a_promotion_that_fails_goes_back_by_itself(ready: Rollout, gateway: Gateway, people: dict[str, User]) -> None:
    services.act(ready, "promote", people["approver"])
    gateway.serves(server("stable", ready.previous.artifact_hash), error="swap refused")
    look(ready)
    gateway.status["error"] = ""
    returned(ready, gateway, "swap refused")


def test_a_canary_that_was_started_again_once_is_watched_on(rollout: Rollout, gateway: Gateway) -> None:
    both(gateway, rollout, starts=services.CANARY_RESTARTS)
    assert look(rollout).state == "canary"


def test_a_long_canary_leaves_a_promotion_its_time(ready: Rollout, gateway: Gateway, people: dict[str, User]) -> None:
    Rollout.objects.filter(id=ready.id).update(changed=timezone.now() - timedelta(hours=1))
    services.act(Rollout.objects.get(id=ready.id), "promote", people["approver"])
    ready.refresh_from_db()
    gateway.serves(server("stable", ready.previous.artifact_hash))
    assert look(ready).state == "promoting"


def test_a_promotion_that_is_never_confirmed_goes_back(
    ready: Rollout, gateway: Gateway, people: dict[str, User]
) -> None:
    services.act(ready, "promote", people["approver"])
    Rollout.objects.filter(id=ready.id).update(changed=timezone.now() - timedelta(hours=1))
    ready.refresh_from_db()
    returned(look(ready), gateway, "was not confirmed within 180 s")


def test_a_return_that_is_not_confirmed_is_asked_for_again(rollout: Rollout, gateway: Gateway) -> None:
    both(gateway, rollout, state="failed")
    look(rollout)
    gateway.serves(server("stable", rollout.previous.artifact_hash, "restarting"), error="engine restarting")
    assert "engine restarting The gateway is asked again." in look(rollout).hold
    asked = len(gateway.plans)
    Rollout.objects.filter(id=rollout.id).update(changed=timezone.now() - timedelta(minutes=1))
    rollout.refresh_from_db()
    look(rollout)
    assert len(gateway.plans) == asked + 1 and gateway.plans[-1]["generation"] == rollout.generation
    look(rollout)
    assert len(gateway.plans) == asked + 1, "it is given time"
    gateway.serves(server("stable", rollout.previous.artifact_hash))
    assert look(rollout).state == "rolled_back"


# A person's steps


def test_pause_and_resume(rollout: Rollout, gateway: Gateway, as_: As) -> None:
    client = as_("approver")
    client.post(reverse("rollout_action", args=[rollout.id, "pause"]))
    both(gateway, rollout)
    answered(rollout, "stable")
    answered(rollout, "canary")
    rollout.refresh_from_db()
    assert look(rollout).state == "paused"
    client.post(reverse("rollout_action", args=[rollout.id, "resume"]))
    rollout.refresh_from_db()
    assert look(rollout).state == "ready"


@pytest.mark.parametrize("action", ["abort", "rollback"])
def test_a_canary_is_ended_by_hand(rollout: Rollout, gateway: Gateway, as_: As, action: str) -> None:
    as_("approver").post(reverse("rollout_action", args=[rollout.id, action]), {"reason": "A customer calls."})
    rollout.refresh_from_db()
    assert rollout.state == "returning"
    assert Entry.objects.get(action=f"rollout.{action}").reason == "A customer calls."
    gateway.serves(server("stable", rollout.previous.artifact_hash))
    assert look(rollout).state == "rolled_back"


def test_an_unknown_step_is_refused(rollout: Rollout, as_: As) -> None:
    response = as_("approver").post(reverse("rollout_action", args=[rollout.id, "explode"]), follow=True)
    assert "There is no step" in response.content.decode()


@pytest.mark.parametrize("action", ["abort", "rollback"])
def test_a_gateway_that_refuses_changes_nothing(rollout: Rollout, gateway: Gateway, as_: As, action: str) -> None:
    gateway.refuse = "The gateway is stopping."
    response = as_("approver").post(reverse("rollout_action", args=[rollout.id, action]), follow=True)
    assert "The gateway is stopping." in response.content.decode()
    rollout.refresh_from_db()
    assert (rollout.state, rollout.generation) == ("canary", 1)
    assert Endpoint.objects.get().generation == 1
    assert not Entry.objects.filter(action=f"rollout.{action}").exists()


def test_two_people_who_promote_at_once_promote_once(ready: Rollout, gateway: Gateway, people: dict[str, User]) -> None:
    seen_by_the_other = Rollout.objects.get(id=ready.id)
    services.act(ready, "promote", people["approver"])
    with pytest.raises(services.Refused):
        services.act(seen_by_the_other, "promote", people["admin"])
    assert len(gateway.plans) == 2


def test_an_endpoint_changes_one_thing_at_a_time(rollout: Rollout, endpoint: Endpoint, as_: As) -> None:
    response = as_("approver").post("/e/chat/rollback/", {"version": 1, "reason": "Back at once."})
    assert "Another change of this endpoint is under way" in response.content.decode()


@pytest.mark.parametrize("state", [s for s, _ in Rollout.State.choices])
def test_a_rollout_shows_in_every_state(state: str, rollout: Rollout, as_: As) -> None:
    Rollout.objects.filter(id=rollout.id).update(state=state, hold="Held <here>.", note="Ended <so>.")
    for name in ("rollout", "rollout_panel"):
        response = as_("approver").get(reverse(name, args=[rollout.id]))
        assert response.status_code == 200
        assert "<here>" not in response.content.decode() and "<so>" not in response.content.decode()
    assert as_("viewer").get("/e/chat/").status_code == as_("viewer").get("/").status_code == 200


# Rolling back


@pytest.fixture
def serving_v2(ready: Rollout, gateway: Gateway, people: dict[str, User], endpoint: Endpoint) -> Endpoint:
    """v1 was promoted, v2 exists, v2 is served."""
    services.act(ready, "promote", people["approver"])
    gateway.serves(server("stable", ready.version.artifact_hash))
    look(ready)
    endpoint.serving = Version.objects.create(endpoint=endpoint, number=2, artifact_hash="2" * 64, name="Second")
    endpoint.save(update_fields=["serving"])
    return endpoint


@pytest.mark.parametrize("number", [0, 1])
def test_any_earlier_version_is_one_step_away(number: int, serving_v2: Endpoint, as_: As, gateway: Gateway) -> None:
    response = as_("approver").post("/e/chat/rollback/", {"version": number, "reason": "Complaints."})
    rollout = Rollout.objects.get(kind="rollback")
    assert response["location"] == reverse("rollout", args=[rollout.id])
    wanted = Version.objects.get(number=number)
    assert [(v["artifact_hash"], v["share"]) for v in gateway.plans[-1]["versions"]] == [(wanted.artifact_hash, 1.0)]
    gateway.serves(server("stable", wanted.artifact_hash))
    assert look(rollout).state == "done"
    serving_v2.refresh_from_db()
    assert serving_v2.serving == wanted
    assert Entry.objects.get(action="rollback.start").reason == "Complaints."
    assert as_("viewer").get(response["location"]).status_code == 200


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"version": "0", "reason": ""}, "reason"),
        ({"version": "2", "reason": "It is served."}, "version"),
        ({"version": "9", "reason": "There is none."}, "version"),
        ({"version": "x", "reason": "Not a number."}, "version"),
    ],
)
def test_a_rollback_needs_a_reason_and_another_version(
    form: dict[str, str], field: str, serving_v2: Endpoint, as_: As
) -> None:
    response = as_("approver").post("/e/chat/rollback/", form)
    assert response.status_code == 200 and field in response.context["form"].errors
    assert not Rollout.objects.filter(kind="rollback").exists()


def test_a_rollback_without_the_gateway_changes_nothing(serving_v2: Endpoint, as_: As, settings: Any) -> None:
    settings.GATEWAY_URL = "http://127.0.0.1:9"
    before = Endpoint.objects.get().generation
    response = as_("approver").post("/e/chat/rollback/", {"version": 0, "reason": "Complaints."})
    assert "cannot be reached. Is it running?" in response.content.decode()
    assert not Rollout.objects.filter(kind="rollback").exists()
    assert Endpoint.objects.get().generation == before


def test_the_form_of_a_rollback_offers_the_version_before(serving_v2: Endpoint, as_: As) -> None:
    response = as_("approver").get("/e/chat/rollback/")
    assert response.context["form"].initial["version"] == 1
    assert [v.number for v in response.context["versions"]] == [1, 0]
