"""Probe traffic: an idle endpoint, whose owner allows it, is sent requests of its own profile so that a canary has data."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import structlog

from engine.models.tokenizer import Tokenizer
from optimizer.traffic.profile import TrafficProfile
from optimizer.traffic.prompts import prompt_ids, source_ids
from polymorph_web.endpoints import gateway
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.rollouts.models import Rollout

log = structlog.get_logger(__name__)
PAIRS = 2  # requests to each side in one round
MAX_TOKENS = 48  # a probe's answer is cut there: it stands beside a customer's own requests
TIMEOUT_S = 60.0


def probe(rollout: Rollout) -> None:
    """One round: the same number of requests to each side, in turn, of the same shapes with fresh content."""
    endpoint = rollout.endpoint
    profile = TrafficProfile.from_json(endpoint.traffic)
    seed = rollout.pk * 100_000 + len(rollout.comparison) + rollout.comparison.get("canary_n", 0)
    shapes = profile.sample(PAIRS, seed, "heldout")
    source = _source(endpoint.model_path)
    sends = []
    for i, shape in enumerate(shapes):
        order = ("canary", "stable") if i % 2 else ("stable", "canary")
        for role in order:
            ids = prompt_ids(shape, f"probe {seed} {i} {role}", source)
            body = {
                "prompt": ids,
                "max_tokens": min(shape.osl, MAX_TOKENS),
                "ignore_eos": True,
                **shape.sampling(),
                "stream": True,
            }
            sends.append((endpoint, body, role))
    for send in sends:  # one at a time: what is compared is the versions, not a queue
        _send(*send)


def _send(endpoint: Endpoint, body: dict[str, Any], role: str) -> None:
    url, headers, body = gateway.completions_request(endpoint, body, role)
    try:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S) as response:
            for _ in response.iter_bytes():
                pass
    except httpx.HTTPError as error:
        log.warning("a probe got no answer", endpoint=endpoint.slug, role=role, error=str(error))


@lru_cache(maxsize=4)
def _source(model_path: str) -> tuple[int, ...]:
    return source_ids(Tokenizer(Path(model_path)).encode)
