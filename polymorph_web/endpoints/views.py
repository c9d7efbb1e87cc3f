"""The fleet, registering an endpoint, and an endpoint's own page."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from optimizer.traffic.profile import TrafficProfile
from polymorph_web.accounts.access import current_membership, get_endpoint, may, require_membership
from polymorph_web.audit.models import Entry
from polymorph_web.endpoints import gateway, overview, services
from polymorph_web.endpoints.charts import traffic_charts
from polymorph_web.endpoints.forms import EndpointForm
from polymorph_web.endpoints.models import Endpoint

TABS = ("overview", "performance", "versions", "runs", "activity")
TRY_TOKENS = 256
SAMPLE = 500


@login_required
@require_GET
def fleet(request: HttpRequest) -> HttpResponse:
    membership = current_membership(request)
    if membership is None and request.user.is_staff:
        return redirect("support")
    membership = require_membership(request)
    endpoints = membership.organisation.endpoints.select_related("serving", "organisation").order_by("name")
    cards = [overview.card(e) for e in endpoints]
    context = {
        "cards": cards,
        "needs": overview.needs_you(membership.organisation),
        "may_create": membership.may("member"),
    }
    return render(request, "endpoints/fleet.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    membership = require_membership(request, "member")
    form = EndpointForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid() and form.profile is not None:
        created = services.create_endpoint(
            membership.organisation, request.user, form.cleaned_data, form.profile, form.model_path
        )
        messages.success(request, f"{created.name} is registered. Click Optimise to make it faster.")
        return redirect("endpoint", created.slug)
    profile = form.profile or overview.presets_by_name()["demo"]
    context = {
        "form": form,
        "hardware": services.hardware(),
        "presets": overview.preset_rows(),
        "charts": traffic_charts(profile.sample(SAMPLE, 0)),
        "sampling": profile.sampling_text,
        "formula": overview.FORMULA,
    }
    return render(request, "endpoints/new.html", context)


@login_required
@require_POST
def preview(request: HttpRequest) -> HttpResponse:
    """Histograms of the traffic typed so far."""
    require_membership(request, "member")
    form = EndpointForm(request.POST, request.FILES)
    profile = form.traffic_only()
    errors = [str(e) for group in form.errors.values() for e in group]
    charts = traffic_charts(profile.sample(SAMPLE, 0)) if profile else ()
    context = {
        "charts": charts,
        "formula": overview.FORMULA,
        "errors": errors,
        "notes": profile.notes if profile else (),
        "sampling": profile.sampling_text if profile else "",
    }
    return render(request, "endpoints/_preview.html", context)


@login_required
@require_POST
def demo(request: HttpRequest) -> HttpResponse:
    membership = require_membership(request, "member")
    return redirect("endpoint", services.demo_endpoint(membership.organisation, request.user).slug)


@login_required
@require_GET
def detail(request: HttpRequest, slug: str) -> HttpResponse:
    endpoint = get_endpoint(request.user, slug)
    tab = request.GET.get("tab", "overview")
    tab = tab if tab in TABS else "overview"
    organisation = endpoint.organisation
    state, state_text, servers = overview.serving_state(endpoint)
    live_rollout = overview.live_rollout(endpoint)
    profile = TrafficProfile.from_json(endpoint.traffic)
    context: dict[str, Any] = {
        "endpoint": endpoint,
        "tab": tab,
        "tabs": TABS,
        "state": state,
        "state_text": state_text,
        "servers": servers,
        "gateway_url": settings.GATEWAY_URL,
        "serving": endpoint.serving,
        "live_run": overview.live_run(endpoint),
        "live_rollout": live_rollout,
        "requests_summary": services.usage(endpoint),
        "versions": [
            {"version": v, "is_serving": v.id == endpoint.serving_id, "gain": v.gain} for v in endpoint.versions.all()
        ],
        "runs": endpoint.runs.select_related("created_by").defer("config")[:50],
        "rollouts": endpoint.rollouts.select_related("version", "previous", "started_by")[:50],
        "entries": Entry.objects.filter(organisation=organisation, target__contains=endpoint.slug)[:50],
        "sampling": profile.sampling_text,
        "charts": traffic_charts(profile.sample(SAMPLE, 0)) if tab == "performance" else (),
        "may": {
            "optimise": may(request.user, organisation, "member"),
            "approve": may(request.user, organisation, "approver"),
            "rollback": may(request.user, organisation, "approver")
            and live_rollout is None
            and endpoint.versions.count() > 1,
        },
    }
    return render(request, "endpoints/detail.html", context)


@require_POST
async def try_it(request: HttpRequest, slug: str) -> HttpResponse:
    """Streams an answer to one prompt as plain text, through the same gateway that customers' clients use."""
    user = await request.auser()
    if not user.is_authenticated:
        return JsonResponse({"error": "Sign in first."}, status=401)
    endpoint = await sync_to_async(get_endpoint)(user, slug)
    try:
        tokens = min(int(request.POST.get("max_tokens") or TRY_TOKENS), TRY_TOKENS)
    except ValueError:
        return JsonResponse({"error": "max_tokens must be a whole number."}, status=400)
    prompt = request.POST.get("prompt", "").strip()
    if not prompt:
        return JsonResponse({"error": "Type a prompt first."}, status=400)
    return await _stream(endpoint, prompt, tokens)


async def _stream(endpoint: Endpoint, prompt: str, tokens: int) -> HttpResponse:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True, "temperature": 0}
    url, body = gateway.chat_request(endpoint, body)
    client = httpx.AsyncClient(timeout=120)
    try:
        response = await client.send(client.build_request("POST", url, json=body), stream=True)
    except httpx.HTTPError:
        await client.aclose()
        return JsonResponse({"error": "The gateway cannot be reached. Is it running?"}, status=503)
    if response.status_code != 200:
        message = json.loads(await response.aread() or b"{}").get("error", {}).get("message", "The endpoint refused.")
        await client.aclose()
        return JsonResponse({"error": message}, status=response.status_code)
    headers = {"x-polymorph-version": response.headers.get("x-polymorph-version", "")}
    return StreamingHttpResponse(_text(client, response), content_type="text/plain; charset=utf-8", headers=headers)


async def _text(client: httpx.AsyncClient, response: httpx.Response) -> AsyncIterator[str]:
    try:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                yield f"\n[{chunk['error']['message']}]"
            for choice in chunk.get("choices", []):
                yield choice.get("delta", {}).get("content") or ""
    finally:
        await response.aclose()
        await client.aclose()
