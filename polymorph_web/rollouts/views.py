"""Deciding on a result, following a rollout, rolling back."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from polymorph_web.accounts.access import get_endpoint, get_rollout, get_run, may
from polymorph_web.endpoints import gateway
from polymorph_web.endpoints.gateway import GatewayError
from polymorph_web.rollouts import services
from polymorph_web.rollouts.forms import DecisionForm, RollbackForm
from polymorph_web.rollouts.models import Decision, Rollout
from polymorph_web.rollouts.services import Refused
from polymorph_web.runs import summary
from polymorph_web.runs.models import Run

PLAN = (
    "A canary engine starts beside the running one and answers 25% of the requests.",
    "Once both sides have answered 20 requests and nothing is worse, it can be promoted.",
    "Promoting swaps the forward pass of the running engine: no restart, running streams end on their version.",
    "A breach at any point returns to the version before, by itself.",
)


@login_required
@require_http_methods(["GET", "POST"])
def approve(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = get_run(request.user, run_id, "approver")
    form = DecisionForm(request.POST or None, initial={"artifact_hash": run.winner_hash, "action": "approve"})
    if request.method == "POST" and form.is_valid() and (answer := _decide(request, run, form)) is not None:
        return answer
    decision = Decision.objects.filter(run=run, artifact_hash=run.winner_hash).select_related("actor").first()
    context = {
        **summary.report_context(run),
        "run": run,
        "endpoint": run.endpoint,
        "gates": gates(run),
        "plan": PLAN,
        "form": form,
        "blocked": services.why_blocked(run, request.user),
        "decision": decision,
    }
    return render(request, "rollouts/approve.html", context)


def _decide(request: HttpRequest, run: Run, form: DecisionForm) -> HttpResponse | None:
    data = form.cleaned_data
    approved = data["action"] == "approve"
    try:
        with transaction.atomic():  # an approval that cannot be released is not recorded: it can be given again
            decision = services.decide(run, request.user, approved, data["reason"], data["artifact_hash"])
            rollout = services.release(decision, request.user) if approved else None
        if rollout is not None:
            return redirect("rollout", rollout.id)
        messages.info(request, "Declined. The endpoint stays as it is.")
        return redirect("run_report", run.id)
    except (Refused, GatewayError) as error:
        form.add_error(None, str(error))
        return None


def gates(run: Run) -> list[dict[str, Any]]:
    """What must hold before an approval."""
    report = run.report or {}
    speedup = report.get("speedup") or {}
    checks = report.get("verification") or []
    bad = [c for c in checks if c.get("verdict") in ("fail", "inconclusive")]
    return [
        {"text": "The winner was measured end to end on held-out traffic.", "ok": bool(speedup.get("ratio"))},
        {"text": "The 95% confidence interval lies above 1.", "ok": (speedup.get("ci_low") or 0) > 1},
        {"text": f"All {len(checks)} verification checks passed in a fresh process.", "ok": bool(checks) and not bad},
        {"text": "Checks are a gate, not a guarantee: the canary watches real requests.", "ok": True},
    ]


@login_required
@require_GET
def detail(request: HttpRequest, rollout_id: int) -> HttpResponse:
    return render(request, "rollouts/detail.html", _context(request, rollout_id))


@login_required
@require_GET
def panel(request: HttpRequest, rollout_id: int) -> HttpResponse:
    return render(request, "rollouts/_panel.html", _context(request, rollout_id))


@login_required
@require_POST
def act(request: HttpRequest, rollout_id: int, action: str) -> HttpResponse:
    rollout = get_rollout(request.user, rollout_id, "approver")
    try:
        services.act(rollout, action, request.user, request.POST.get("reason", "").strip())
    except (Refused, GatewayError) as error:
        messages.error(request, str(error))
    return redirect("rollout", rollout.id)


@login_required
@require_http_methods(["GET", "POST"])
def rollback(request: HttpRequest, slug: str) -> HttpResponse:
    endpoint = get_endpoint(request.user, slug, "approver")
    initial = {"version": request.GET.get("version") or _previous(endpoint)}
    form = RollbackForm(endpoint, request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid():
        try:
            rollout = services.roll_back(
                endpoint, form.cleaned_data["version"], request.user, form.cleaned_data["reason"]
            )
            return redirect("rollout", rollout.id)
        except (Refused, GatewayError) as error:
            form.add_error(None, str(error))
    context = {
        "endpoint": endpoint,
        "serving": endpoint.serving,
        "form": form,
        "versions": endpoint.versions.exclude(pk=endpoint.serving_id),
        "preview": [
            f"{endpoint.name} now answers with {endpoint.serving}.",
            "The running engine swaps its forward pass: no restart, running streams end on the version they began on.",
            "New requests are answered by the version chosen here within seconds; nothing is deleted.",
        ],
    }
    return render(request, "rollouts/rollback.html", context)


def _previous(endpoint: Any) -> int | None:
    """The version that was served before this one, else the newest other."""
    last = (
        endpoint.rollouts.filter(state=Rollout.State.DONE, version=endpoint.serving).select_related("previous").first()
    )
    if last is not None:
        return int(last.previous.number)
    other = endpoint.versions.exclude(pk=endpoint.serving_id).first()
    return other.number if other else None


def _context(request: HttpRequest, rollout_id: int) -> dict[str, Any]:
    rollout = get_rollout(request.user, rollout_id)
    try:
        servers = gateway.status(rollout.endpoint).get("servers", [])
    except GatewayError:
        servers = []
    return {
        "rollout": rollout,
        "endpoint": rollout.endpoint,
        "comparison": rollout.comparison.get("rows", []),
        "steps": steps(rollout),
        "servers": servers,
        "may": {"act": may(request.user, rollout.endpoint.organisation, "approver")},
    }


def steps(rollout: Rollout) -> list[dict[str, str]]:
    """The stations of this change and where it stands."""
    if rollout.kind == "rollback":
        texts = [
            ("promoting", f"Swap the running engine to {rollout.version}"),
            ("done", f"{rollout.version} answers every request"),
        ]
    else:
        texts = [
            ("canary", f"Canary: {rollout.version} answers {rollout.share:.0%} of the requests"),
            ("ready", f"Soak: {rollout.soak_requests} requests answered by each side"),
            ("promoting", "Promote: the running engine swaps its forward pass"),
            ("done", f"{rollout.version} answers every request"),
        ]
    order = [name for name, _ in texts]
    at = order.index(rollout.state) if rollout.state in order else 0
    ended = rollout.state == Rollout.State.DONE
    return [
        {"text": t, "state": "done" if ended or i < at else "now" if i == at else "todo"}
        for i, (_, t) in enumerate(texts)
    ]
