"""Cards of the fleet and what needs a person."""

from __future__ import annotations

from typing import Any

from django.urls import reverse

from optimizer.traffic.profile import TrafficProfile
from optimizer.traffic.sources import presets
from polymorph_web.accounts.models import Organisation
from polymorph_web.endpoints import gateway, services
from polymorph_web.endpoints.charts import sparkline
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.rollouts.models import Decision, Rollout
from polymorph_web.runs.models import LIVE_STATES, Run

FORMULA = "$/M output tokens = price per hour ÷ (output tokens/s × 3600) × 1,000,000"


def card(endpoint: Endpoint) -> dict[str, Any]:
    usage = services.usage(endpoint)
    state, state_text, _ = serving_state(endpoint)
    return {
        "endpoint": endpoint,
        "version_id": endpoint.serving.version_id if endpoint.serving else "",
        "output_tput": usage.get("output_tput"),
        "p95_ttft_s": usage.get("p95_ttft_s"),
        "usd_per_m": usage.get("usd_per_m"),
        "spark": sparkline(usage["spark"], _changes(usage.get("versions", []))),
        "state": state,
        "state_text": state_text,
        "best_gain": best_gain(endpoint),
        "live_run": live_run(endpoint),
        "live_rollout": live_rollout(endpoint),
    }


def serving_state(endpoint: Endpoint) -> tuple[str, str, list[dict[str, Any]]]:
    """(state, sentence, servers) as the gateway tells it now."""
    try:
        told = gateway.status(endpoint)
    except gateway.GatewayError as error:
        return "down", str(error), []
    servers = told.get("servers", [])
    stable = next((s for s in servers if s["role"] == "stable"), None)
    if told.get("error"):
        return "down", str(told["error"]), servers
    if stable is None or stable["state"] != "ready":
        return "starting", "The engine is starting.", servers
    if any(s["role"] == "canary" for s in servers):
        return "rollout", "A new version answers a share of the requests.", servers
    return "serving", f"Answering with version {stable['version_id']}.", servers


def live_run(endpoint: Endpoint) -> Run | None:
    return endpoint.runs.filter(state__in=LIVE_STATES).first()


def live_rollout(endpoint: Endpoint) -> Rollout | None:
    return endpoint.rollouts.filter(state__in=Rollout.LIVE).select_related("version").first()


def best_gain(endpoint: Endpoint) -> float | None:
    """The ratio of the newest result that nobody has decided on yet."""
    run = _undecided(endpoint)
    return (run.report or {}).get("speedup", {}).get("ratio") if run else None


def needs_you(organisation: Organisation) -> list[dict[str, str]]:
    needs = []
    for endpoint in organisation.endpoints.all():
        if run := _undecided(endpoint):
            needs.append(
                {
                    "kind": "approval",
                    "text": f"{endpoint.name}: a faster version waits for approval.",
                    "url": reverse("approve", args=[run.id]),
                }
            )
        if (rollout := live_rollout(endpoint)) and (rollout.hold or rollout.state == Rollout.State.READY):
            text = rollout.hold or f"{rollout.version} passed its canary and can be promoted."
            needs.append(
                {"kind": "hold", "text": f"{endpoint.name}: {text}", "url": reverse("rollout", args=[rollout.id])}
            )
        last = endpoint.runs.first()
        if last and last.state == Run.State.FAILED:
            needs.append(
                {
                    "kind": "failure",
                    "text": f"{endpoint.name}: the last run failed. {last.reason}",
                    "url": reverse("run", args=[last.id]),
                }
            )
    return needs


def presets_by_name() -> dict[str, TrafficProfile]:
    return presets()


def preset_rows() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "title": name.replace("-", " ").capitalize(),
            "isl_median": p.quantile("isl", 0.5),
            "osl_median": p.quantile("osl", 0.5),
            "concurrency": p.concurrency,
            "source": p.attribution,
        }
        for name, p in presets().items()
    ]


def _undecided(endpoint: Endpoint) -> Run | None:
    run = endpoint.runs.filter(state=Run.State.SUCCEEDED).first()
    if run is None or Decision.objects.filter(run=run, artifact_hash=run.winner_hash).exists():
        return None
    return run


def _changes(versions: list[str]) -> list[int]:
    return [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
