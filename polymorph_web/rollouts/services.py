"""The changes of a running endpoint, one compare-and-swap state machine. Every change is asked of the gateway as a whole plan,

confirmed by the hash that it then serves, and written to the audit log.
"""

from __future__ import annotations

import time
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from polymorph_web.accounts.models import User
from polymorph_web.audit import log as audit
from polymorph_web.endpoints import gateway
from polymorph_web.endpoints.models import Endpoint, RequestShape, Version
from polymorph_web.rollouts.compare import Comparison, Shape, compare
from polymorph_web.rollouts.models import Decision, Rollout
from polymorph_web.runs.models import Run

State = Rollout.State
CHANGE_LIMIT_S = 180.0  # a plan that is not applied by then is taken back
ASK_AGAIN_S = 10.0  # between two asks for a way back that was not applied
CANARY_RESTARTS = 2  # restarts of the canary's server that count as a crash


class Refused(Exception):
    """The step cannot be taken now; the text says why."""


def decide(run: Run, user: User, approve: bool, reason: str, artifact_hash: str) -> Decision:
    """Records a decision on exactly the artefact that the person saw. Raises Refused."""
    if blocked := why_blocked(run, user):
        raise Refused(blocked)
    if artifact_hash != run.winner_hash:
        raise Refused("The result changed while you looked at it. Read it again, then decide.")
    with transaction.atomic():
        decision = Decision.objects.create(
            run=run, artifact_hash=artifact_hash, approved=approve, reason=reason, actor=user
        )
        action = "run.approve" if approve else "run.decline"
        audit.record(
            run.endpoint.organisation,
            user,
            action,
            f"run {run.id} of {run.endpoint.slug}",
            reason=reason,
            after={"artifact": artifact_hash},
        )
    return decision


def why_blocked(run: Run, user: User) -> str:
    """Why `user` may not decide on this run now, or "" when they may."""
    if run.state != Run.State.SUCCEEDED or not run.winner_hash:
        return "There is no verified winner to decide on."
    if Decision.objects.filter(run=run, artifact_hash=run.winner_hash).exists():
        return "This result has been decided on already."
    organisation = run.endpoint.organisation
    if run.created_by_id == user.id and not organisation.self_approval:
        return "Who started a run may not decide on its result here. Ask another approver."
    return ""


def release(decision: Decision, user: User) -> Rollout:
    """Starts the canary of an approved artefact. Raises Refused or GatewayError, with nothing changed."""
    run, endpoint = decision.run, decision.run.endpoint
    if decision.artifact_hash != run.winner_hash or not decision.approved:
        raise Refused("This approval is void: the result is another one now.")
    speedup = run.report["speedup"]
    gain = {k: speedup.get(k) for k in ("ratio", "ci_low", "ci_high")}
    with transaction.atomic():
        locked = Endpoint.objects.select_for_update().get(pk=endpoint.pk)
        number = locked.versions.order_by("-number").values_list("number", flat=True).first() or 0
        version = locked.versions.filter(artifact_hash=decision.artifact_hash).first() or Version.objects.create(
            endpoint=locked,
            number=number + 1,
            artifact_hash=decision.artifact_hash,
            name=run.report["winner"]["name"],
            run=run,
            gain=gain,
        )
        rollout = _open(locked, version, user, decision.reason, kind="release", decision=decision, state=State.CANARY)
        stable, canary = (locked.serving, 1 - rollout.share, "stable"), (version, rollout.share, "canary")
        _ask(locked, rollout, [stable, canary])
        audit.record(
            locked.organisation,
            user,
            "rollout.canary",
            f"{locked.slug} {version}",
            reason=decision.reason,
            after={"share": rollout.share},
        )
    return rollout


def roll_back(endpoint: Endpoint, version: Version, user: User, reason: str) -> Rollout:
    """Returns an endpoint to an earlier version, in one step. Raises Refused or GatewayError."""
    with transaction.atomic():
        locked = Endpoint.objects.select_for_update().get(pk=endpoint.pk)
        if locked.serving_id == version.id:
            raise Refused(f"{version} is what this endpoint serves already.")
        before = {"version": str(locked.serving), "artifact": locked.serving.artifact_hash}
        rollout = _open(locked, version, user, reason, kind="rollback", state=State.PROMOTING)
        _ask(locked, rollout, [(version, 1.0, "stable")])
        audit.record(
            locked.organisation, user, "rollback.start", f"{locked.slug} {version}", reason=reason, before=before
        )
    return rollout


def act(rollout: Rollout, action: str, user: User, reason: str = "") -> None:
    """A person's step: promote, pause, resume, abort or rollback. Raises Refused or GatewayError."""
    steps = {
        "promote": ((State.READY,), State.PROMOTING),
        "pause": ((State.CANARY, State.READY), State.PAUSED),
        "resume": ((State.PAUSED,), State.CANARY),
        "abort": ((State.CANARY, State.READY, State.PAUSED), State.RETURNING),
        "rollback": ((State.CANARY, State.READY, State.PAUSED, State.PROMOTING), State.RETURNING),
    }
    if action not in steps:
        raise Refused(f"There is no step {action!r}.")
    before, after = steps[action]
    with transaction.atomic():
        if not move(rollout, before, after, note=reason if after == State.RETURNING else ""):
            raise Refused(f"A rollout that is {State(rollout.state).label.lower()} cannot {action} now.")
        if after == State.PROMOTING:
            _ask(rollout.endpoint, rollout, [(rollout.version, 1.0, "stable")])
        elif after == State.RETURNING:
            _ask(rollout.endpoint, rollout, [(rollout.previous, 1.0, "stable")])
        audit.record(
            rollout.endpoint.organisation,
            user,
            f"rollout.{action}",
            f"{rollout.endpoint.slug} {rollout.version}",
            reason=reason,
        )


def move(rollout: Rollout, before: tuple[str, ...], after: str, **changes: Any) -> bool:
    """Compare-and-swap of the state: False when somebody else moved it first."""
    changes |= {"hold": "", "changed": timezone.now()}
    moved = Rollout.objects.filter(pk=rollout.pk, state__in=before).update(state=after, **changes)
    rollout.refresh_from_db()
    return bool(moved)


def advance(rollout: Rollout) -> None:
    """One look at a live rollout by the product itself. Raises GatewayError when the gateway cannot be asked."""
    told = gateway.status(rollout.endpoint)
    if rollout.state in (State.PROMOTING, State.RETURNING):
        _confirm(rollout, told)
    elif rollout.state in (State.CANARY, State.READY, State.PAUSED):
        _watch(rollout, told)


def samples(rollout: Rollout) -> list[Shape]:
    """Requests answered since the canary began, in order."""
    since = rollout.created.timestamp()
    rows = RequestShape.objects.filter(endpoint=rollout.endpoint, ts__gte=since).order_by("ts")
    return [Shape(*row) for row in rows.values_list("role", "osl", "ttft_s", "e2el_s", "status")]


def _watch(rollout: Rollout, told: dict[str, Any]) -> None:
    canary = next((s for s in told.get("servers", []) if s["role"] == "canary"), None)
    result = compare(samples(rollout), rollout.soak_requests, rollout.endpoint.slo)
    Rollout.objects.filter(pk=rollout.pk).update(
        comparison={"rows": result.rows, "canary_n": result.canary_n, "stable_n": result.stable_n}
    )
    if breach := _crash(rollout, told, canary) or result.breach:
        _return(rollout, breach)
        return
    if rollout.state == State.PAUSED:
        return
    _settle(rollout, result, canary)


def _crash(rollout: Rollout, told: dict[str, Any], canary: dict[str, Any] | None) -> str:
    stable = next((s for s in told.get("servers", []) if s["role"] == "stable"), None)
    if stable and stable["state"] == "failed":
        return f"The stable version's server failed beside the canary: {stable['error'] or 'its log says why'}"
    if told.get("error"):
        return f"The canary could not be served: {told['error']}"
    if canary and (canary["state"] == "failed" or canary["starts"] > CANARY_RESTARTS):
        return "The canary's server crashed."
    waited = time.time() - rollout.created.timestamp()
    if (canary is None or canary["state"] != "ready") and rollout.state == State.CANARY and waited > CHANGE_LIMIT_S:
        return f"The canary did not start within {CHANGE_LIMIT_S:.0f} s."
    return ""


def _settle(rollout: Rollout, result: Comparison, canary: dict[str, Any] | None) -> None:
    if canary is None or canary["state"] != "ready":
        hold = "The canary's engine is starting."
    else:
        hold = result.hold
    if not hold and move(rollout, (State.CANARY,), State.READY):
        note = {"canary_n": result.canary_n, "stable_n": result.stable_n}
        audit.record(
            rollout.endpoint.organisation,
            None,
            "rollout.ready",
            f"{rollout.endpoint.slug} {rollout.version}",
            after=note,
        )
    elif hold != rollout.hold:
        Rollout.objects.filter(pk=rollout.pk).update(hold=hold)


def _return(rollout: Rollout, why: str) -> None:
    """The product rolls back by itself."""
    with transaction.atomic():
        if move(rollout, (State.CANARY, State.READY, State.PAUSED, State.PROMOTING), State.RETURNING, note=why):
            _ask(rollout.endpoint, rollout, [(rollout.previous, 1.0, "stable")])
            audit.record(
                rollout.endpoint.organisation,
                None,
                "rollout.breach",
                f"{rollout.endpoint.slug} {rollout.version}",
                reason=why,
            )


def _confirm(rollout: Rollout, told: dict[str, Any]) -> None:
    """Ends a change once the gateway serves the very hash that was asked for."""
    wanted = rollout.version if rollout.state == State.PROMOTING else rollout.previous
    stable = next((s for s in told.get("servers", []) if s["role"] == "stable"), {})
    applied = told.get("applied_generation", -1) >= rollout.generation
    if applied and stable.get("artifact_hash") == wanted.artifact_hash and stable.get("state") == "ready":
        _finish(rollout, wanted)
    elif told.get("error") or time.time() - rollout.changed.timestamp() > CHANGE_LIMIT_S:
        why = told.get("error") or f"The change was not confirmed within {CHANGE_LIMIT_S:.0f} s."
        if rollout.state == State.PROMOTING:
            _return(rollout, str(why))
        else:
            _ask_again(rollout, str(why))


def _ask_again(rollout: Rollout, why: str) -> None:
    """A way back that the gateway could not take is asked for until it can."""
    Rollout.objects.filter(pk=rollout.pk).update(hold=f"{why[:250]} The gateway is asked again.")
    if time.time() - rollout.changed.timestamp() > ASK_AGAIN_S:
        with transaction.atomic():
            Rollout.objects.filter(pk=rollout.pk).update(changed=timezone.now())
            _ask(rollout.endpoint, rollout, [(rollout.previous, 1.0, "stable")])


def _finish(rollout: Rollout, serving: Version) -> None:
    end = State.DONE if rollout.state == State.PROMOTING else State.ROLLED_BACK
    endpoint = rollout.endpoint
    with transaction.atomic():
        if not move(rollout, (rollout.state,), end):
            return
        Endpoint.objects.filter(pk=endpoint.pk).update(serving=serving)
        before = {"version": str(rollout.previous), "artifact": rollout.previous.artifact_hash}
        after = {"version": str(serving), "artifact": serving.artifact_hash, "generation": rollout.generation}
        action = "serving.confirmed" if end == State.DONE else "rollout.rolled_back"
        audit.record(
            endpoint.organisation,
            None,
            action,
            f"{endpoint.slug} {serving}",
            reason=rollout.note,
            before=before,
            after=after,
        )


def _open(endpoint: Endpoint, version: Version, user: User, reason: str, **values: Any) -> Rollout:
    if endpoint.rollouts.filter(state__in=Rollout.LIVE).exists():
        raise Refused("Another change of this endpoint is under way. Let it end, or abort it.")
    try:
        return Rollout.objects.create(
            endpoint=endpoint, version=version, previous=endpoint.serving, started_by=user, reason=reason, **values
        )
    except IntegrityError as error:
        raise Refused("Another change of this endpoint has just begun.") from error


def _ask(endpoint: Endpoint, rollout: Rollout, versions: list[tuple[Version, float, str]]) -> None:
    """Puts the next plan. Inside the transaction: a gateway that refuses undoes the change of state."""
    locked = Endpoint.objects.select_for_update().get(pk=endpoint.pk)
    generation = locked.generation + 1
    Endpoint.objects.filter(pk=endpoint.pk).update(generation=generation)
    Rollout.objects.filter(pk=rollout.pk).update(generation=generation)
    gateway.put_plan(endpoint, generation, versions)
    rollout.refresh_from_db()
