"""Pages of a run: start it, watch it, look at a candidate, read the result."""

from __future__ import annotations

import csv
import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from engine.artifacts import ArtifactError, ArtifactStore
from optimizer.builder import kinds_off
from optimizer.export.folder import ExportError, export
from polymorph_web.accounts.access import get_endpoint, get_run, may
from polymorph_web.rollouts.models import Decision
from polymorph_web.runs import charts, services, summary
from polymorph_web.runs.board import Filter, board_page
from polymorph_web.runs.forms import OptimiseForm, PublishedForm
from polymorph_web.runs.models import Run
from polymorph_web.runs.report_charts import report_charts
from polymorph_web.runs.state import live_state, queue_position
from polymorph_web.runs.store import DjangoRunStore
from polymorph_web.ui.diff import diff_files


@login_required
@require_http_methods(["GET", "POST"])
def optimise(request: HttpRequest, slug: str) -> HttpResponse:
    endpoint = get_endpoint(request.user, slug, "member")
    form = OptimiseForm(request.POST or None, offer=settings.LLM_OFFER)
    if request.method == "POST" and form.is_valid():
        return _to_run(request, lambda: services.start_run(endpoint, request.user, form.cleaned_data))
    minutes = form["budget_minutes"].value() or 5
    context = {
        "endpoint": endpoint,
        "form": form,
        "expected": summary.expected(float(minutes) if str(minutes).replace(".", "", 1).isdigit() else 5.0, endpoint),
        "untouched": summary.UNTOUCHED,
        "limits": kinds_off(),
    }
    return render(request, "runs/optimise.html", context)


@login_required
@require_GET
def live(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = get_run(request.user, run_id)
    organisation = run.endpoint.organisation
    state = live_state(run)
    context = {
        "run": run,
        "endpoint": run.endpoint,
        "state": state,
        "board": board_page(run, Filter.read(request.GET)),
        "language_models": summary.language_models(state),
        "progress_chart": charts.progress_chart(state["experiments"]),
        "tradeoff_chart": charts.tradeoff_chart(state["experiments"]),
        "predictions_chart": charts.predictions_chart(state["experiments"]),
        "predictions_words": charts.predictions_words(state["experiments"]),
        "ws_path": f"/ws/runs/{run.id}/",
        "queue_position": queue_position(run) if run.state == Run.State.QUEUED else 0,
        "may": {
            "cancel": run.is_live and may(request.user, organisation, "member"),
            "approve": run.state == "succeeded" and may(request.user, organisation, "approver"),
        },
    }
    return render(request, "runs/live.html", context)


@login_required
@require_GET
def board(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Threads alone: filtered, those before a post, or the one with a post. The page's address follows the filter."""
    run = get_run(request.user, run_id)
    chosen = Filter.read(request.GET)
    before, thread = request.GET.get("before", ""), request.GET.get("thread", "")
    response = render(request, "runs/_threads.html", {"run": run, "board": board_page(run, chosen, before, thread)})
    if not before and not thread:
        response["HX-Replace-Url"] = reverse("run", args=[run.id]) + chosen.query
    return response


@login_required
@require_GET
def events(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The event log after `?after=`, for pages whose socket cannot connect."""
    run = get_run(request.user, run_id)
    after = request.GET.get("after", "0")
    return JsonResponse({"events": DjangoRunStore().events(str(run.id), int(after) if after.isdigit() else 0)})


@login_required
@require_POST
def cancel(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = get_run(request.user, run_id, "member")
    services.cancel_run(run, request.user)
    messages.info(request, "The run is being stopped; what was measured is kept.")
    return redirect("run", run.id)


@login_required
@require_POST
def retry(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = get_run(request.user, run_id, "member")
    if run.is_live:
        messages.info(request, "This run has not ended yet.")
        return redirect("run", run.id)
    return _to_run(request, lambda: services.repeat_run(run, request.user))


def _to_run(request: HttpRequest, start: Callable[[], Run]) -> HttpResponse:
    """Leads to the run that `start` makes, or to the one that goes on."""
    try:
        return redirect("run", start().id)
    except services.Busy as busy:
        messages.info(request, str(busy))
        return redirect("run", busy.run.id)


@login_required
@require_GET
def candidate(request: HttpRequest, run_id: Any, artifact_hash: str) -> HttpResponse:
    run = get_run(request.user, run_id)
    found = summary.candidate(run, artifact_hash)
    if found is None:
        raise Http404("Not found.")
    mode = "split" if request.GET.get("diff") == "split" else "unified"
    against = "parent" if request.GET.get("against") == "parent" and found["candidate"].get("parent") else "baseline"
    store = ArtifactStore(settings.DATA_DIR)
    try:
        base = store.get(found["candidate"]["parent"]) if against == "parent" else store.baseline()
        old = base.files()
    except ArtifactError:
        old = {}
    files = (found["proposal"] or {}).get("files", {})
    context = {
        **found,
        "run": run,
        "endpoint": run.endpoint,
        "diff": diff_files(old, files, mode),
        "diff_mode": mode,
        "against": against,
        "box": charts.repeats_chart(found["experiments"]),
        "environment": (run.report or {}).get("environment", {}),
        "reproduce": summary.reproduce(run),
    }
    return render(request, "runs/candidate.html", context)


@login_required
@require_GET
def report(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = get_run(request.user, run_id)
    if not run.report:
        return redirect("run", run.id)
    return _report_page(request, run, PublishedForm())


def _report_page(request: HttpRequest, run: Run, form: PublishedForm, status: int = 200) -> HttpResponse:
    decision = Decision.objects.filter(run=run, artifact_hash=run.winner_hash).select_related("actor").first()
    rollout = decision.rollouts.first() if decision else None
    organisation = run.endpoint.organisation
    published = list(organisation.published.all())
    context = {
        **summary.report_context(run),
        "run": run,
        "endpoint": run.endpoint,
        "charts": report_charts(run.report, run.endpoint.slo, [p for file in published for p in file.points]),
        "decision": decision,
        "rollout": rollout,
        "published": published,
        "published_form": form,
        "may": {
            "approve": may(request.user, organisation, "approver") and run.state == "succeeded",
            "publish": may(request.user, organisation, "member"),
        },
    }
    return render(request, "runs/report.html", context, status=status)


@login_required
@require_POST
def add_published(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Others' results, for all reports of the organisation; a wrong file comes back with the reason beside its field."""
    run = get_run(request.user, run_id, "member")
    if not run.report:
        return redirect("run", run.id)
    form = PublishedForm(request.POST, request.FILES)
    if not form.is_valid():
        return _report_page(request, run, form, status=422)
    name, points = form.cleaned_data["results"]
    services.add_published(run, request.user, name, points)
    messages.success(request, f"{len(points)} published results are drawn beside yours.")
    return redirect(f"{reverse('run_report', args=[run.id])}#chart-published")


@login_required
@require_POST
def remove_published(request: HttpRequest, run_id: Any, results_id: int) -> HttpResponse:
    run = get_run(request.user, run_id, "member")
    services.remove_published(run, request.user, results_id)
    messages.info(request, "The file is no longer drawn.")
    return redirect("run_report", run.id)


@login_required
@require_GET
def export_zip(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The winner as a folder that serves it, zipped."""
    run = get_run(request.user, run_id)
    name, packed = f"winner-{str(run.id)[:8]}", io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = export(DjangoRunStore().load(str(run.id)), ArtifactStore(settings.DATA_DIR), Path(scratch) / name)
        except (ExportError, ArtifactError) as error:
            raise Http404(str(error)) from error
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                archive.write(path, path.relative_to(scratch))
    response = HttpResponse(packed.getvalue(), content_type="application/zip")
    response["Content-Disposition"] = f'attachment; filename="{name}.zip"'
    return response


@login_required
@require_GET
def report_json(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = get_run(request.user, run_id)
    if not run.report:
        raise Http404("This run has no report.")
    response = HttpResponse(json.dumps(run.report, indent=1), content_type="application/json")
    response["Content-Disposition"] = f'attachment; filename="report-{str(run.id)[:8]}.json"'
    return response


@login_required
@require_GET
def report_csv(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Every raw sample of the final measurement, one request a row."""
    run = get_run(request.user, run_id)
    if not run.report:
        raise Http404("This run has no report.")
    response = HttpResponse(content_type="text/csv")
    response["Content-Disposition"] = f'attachment; filename="samples-{str(run.id)[:8]}.csv"'
    writer = csv.writer(response)
    samples = run.report.get("samples") or {}
    columns = sorted({k for side in ("baseline", "winner") for row in samples.get(side, []) for k in row})
    writer.writerow(["side", *columns])
    for side in ("baseline", "winner"):
        writer.writerows([side, *(row.get(c) for c in columns)] for row in samples.get(side, []))
    return response
