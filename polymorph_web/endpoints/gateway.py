"""The web's side of the gateway's admin API. The token lies in the data folder, readable by its owner only."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from django.conf import settings

from engine.wire import EndpointSpec, ServingPlan, VersionShare
from polymorph_web.endpoints.models import Endpoint, Version

TIMEOUT_S = 10.0


class GatewayError(Exception):
    """The gateway did not do what it was asked; the text is a sentence a person reads."""


def register(endpoint: Endpoint) -> None:
    """Makes the gateway serve the endpoint, on its baseline until a plan says otherwise."""
    spec = EndpointSpec(slug=endpoint.slug, model_path=endpoint.model_path, dtype=endpoint.dtype)
    _call("PUT", f"/admin/endpoints/{endpoint.slug}", msgspec.to_builtins(spec))


def put_plan(endpoint: Endpoint, generation: int, versions: list[tuple[Version, float, str]]) -> None:
    """Asks for a plan; `status` says when it is applied."""
    shares = [VersionShare(v.version_id, v.artifact_hash, share, role) for v, share, role in versions]
    plan = ServingPlan(endpoint.slug, generation, shares)
    _call("PUT", f"/admin/endpoints/{endpoint.slug}/plan", msgspec.to_builtins(plan))


def status(endpoint: Endpoint) -> dict[str, Any]:
    """`{plan, applied_generation, servers, error}` of one endpoint."""
    return dict(_call("GET", f"/admin/endpoints/{endpoint.slug}/plan"))


def completions_request(
    endpoint: Endpoint, body: dict[str, Any], role: str = ""
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """(url, headers, body) of a completion through the gateway; `role` pins it to one side of a rollout."""
    headers = {"authorization": f"Bearer {_token()}", "x-polymorph-role": role} if role else {}
    return f"{settings.GATEWAY_URL}/v1/completions", headers, {"model": endpoint.slug, **body}


def chat_request(endpoint: Endpoint, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"{settings.GATEWAY_URL}/v1/chat/completions", {"model": endpoint.slug, **body}


def _token() -> str:
    try:
        return (settings.DATA_DIR / "gateway.token").read_text().strip()
    except OSError as error:
        raise GatewayError(
            "The gateway has not started yet: it has written no token. Try again in a moment."
        ) from error


def _call(method: str, path: str, body: Any = None) -> Any:
    headers = {"authorization": f"Bearer {_token()}"}
    try:
        response = httpx.request(method, settings.GATEWAY_URL + path, json=body, headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        raise GatewayError(f"The gateway at {settings.GATEWAY_URL} cannot be reached. Is it running?") from error
    if response.status_code >= 400:
        raise GatewayError(f"The gateway refused ({response.status_code}): {_message(response)}")
    return response.json() if response.content else None


def _message(response: httpx.Response) -> str:
    try:
        error = response.json().get("error", {})
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        return response.text[:200]
