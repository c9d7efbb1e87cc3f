"""Making endpoints, reading what they served."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import structlog
from django.conf import settings
from django.db import transaction
from django.utils.text import slugify

from engine.artifacts import ArtifactStore
from engine.models.config import read_config
from engine.models.resolve import resolve_model
from engine.wire import RequestRecord
from kernels.hardware import detect
from optimizer.traffic.profile import TrafficProfile
from optimizer.traffic.sources import presets
from polymorph_web.accounts.models import Organisation, User
from polymorph_web.audit import log as audit
from polymorph_web.endpoints import gateway
from polymorph_web.endpoints.models import Endpoint, RequestShape, Spool, Version

log = structlog.get_logger(__name__)
DEMO = "demo"
SPOOL_CHUNK = 1 << 20


def hardware() -> dict[str, Any]:
    found = detect()
    return {
        "cpu": found.name,
        "cores": found.cores,
        "features": list(found.features),
        "memory_gb": round(found.memory / 1e9, 1),
        "gpu": str(found.gpu) if found.gpu else "",
    }


def create_endpoint(
    organisation: Organisation, user: User, values: dict[str, Any], profile: TrafficProfile, model_path: str
) -> Endpoint:
    """A new endpoint on its baseline version, registered with the gateway."""
    config = read_config(model_path)
    slo = {"ttft_s": values.get("slo_ttft_ms"), "tpot_s": values.get("slo_tpot_ms")}
    with transaction.atomic():
        endpoint = Endpoint.objects.create(
            organisation=organisation,
            slug=values["slug"],
            name=values["name"],
            model_ref=values["model_ref"],
            model_path=model_path,
            dtype=values["dtype"],
            hardware=hardware(),
            traffic=profile.clipped(config.max_position_embeddings).to_json(),
            slo={k: v / 1000 for k, v in slo.items() if v},
            objective=values["objective"],
            price_per_hour=values["price_per_hour"],
            probe_traffic=values.get("probe_traffic", False),
            created_by=user,
        )
        baseline = ArtifactStore(settings.DATA_DIR).baseline(config)
        endpoint.serving = Version.objects.create(
            endpoint=endpoint, number=0, artifact_hash=baseline.hash, name="Baseline: plain PyTorch"
        )
        endpoint.save(update_fields=["serving"])
        audit.record(
            organisation,
            user,
            "endpoint.create",
            endpoint.slug,
            after={"model": values["model_ref"], "traffic": profile.name},
        )
    register(endpoint)
    return endpoint


def register(endpoint: Endpoint) -> None:
    """Tells the gateway; what is wrong is kept on the endpoint and tried again by the conductor."""
    try:
        gateway.register(endpoint)
        problem = ""
    except gateway.GatewayError as error:
        problem = str(error)
    if problem != endpoint.problem:
        endpoint.problem = problem[:500]
        endpoint.save(update_fields=["problem"])


def demo_endpoint(organisation: Organisation, user: User) -> Endpoint:
    """The organisation's demo endpoint, made when it has none yet."""
    found = organisation.endpoints.filter(model_ref=DEMO).first()
    if found is not None:
        return found
    slug = DEMO if not Endpoint.objects.filter(slug=DEMO).exists() else f"{DEMO}-{slugify(organisation.slug)}"
    values = {
        "slug": slug,
        "name": "SmolLM2-135M-Instruct (demo)",
        "model_ref": DEMO,
        "dtype": "bfloat16",
        "objective": "output_throughput",
        "price_per_hour": 0.10,
        "probe_traffic": True,
        "slo_ttft_ms": 2000.0,
        "slo_tpot_ms": 100.0,
    }
    return create_endpoint(organisation, user, values, presets()[DEMO], str(resolve_model(DEMO, settings.DATA_DIR)))


def ingest(endpoint: Endpoint) -> int:
    """Reads what the gateway spooled since last time into rows; returns how many. A half-written line waits."""
    path = settings.DATA_DIR / "records" / f"{endpoint.slug}.jsonl"
    if not path.is_file():
        return 0
    with transaction.atomic():
        spool, _ = Spool.objects.select_for_update().get_or_create(endpoint=endpoint)
        if path.stat().st_size < spool.offset:  # the file was started anew
            spool.offset = 0
        with path.open("rb") as handle:
            handle.seek(spool.offset)
            data = handle.read(SPOOL_CHUNK)
        whole = data[: data.rfind(b"\n") + 1]
        rows = [row for line in whole.splitlines() if (row := _shape(endpoint, line))]
        RequestShape.objects.bulk_create(rows)
        spool.offset += len(whole)
        spool.save(update_fields=["offset"])
    return len(rows)


def _shape(endpoint: Endpoint, line: bytes) -> RequestShape | None:
    try:
        r = msgspec.json.decode(line, type=RequestRecord)
    except msgspec.DecodeError:
        log.warning("a request record could not be read", endpoint=endpoint.slug)
        return None
    return RequestShape(
        endpoint=endpoint, ts=r.ts, version_id=r.version_id, role=r.role, isl=r.isl, osl=r.osl,
        cached_tokens=r.cached_tokens, ttft_s=r.ttft_s, e2el_s=r.e2el_s, status=r.status,
    )  # fmt: skip


def usage(endpoint: Endpoint, since_s: float = 24 * 3600.0) -> dict[str, Any]:
    """What the endpoint answered lately. Output tok/s counts only the time in which requests ran."""
    rows = list(
        RequestShape.objects.filter(endpoint=endpoint, ts__gt=time.time() - since_s)
        .order_by("ts")
        .values_list("ts", "osl", "isl", "cached_tokens", "ttft_s", "e2el_s", "status", "version_id")[:20000]
    )
    good = [r for r in rows if r[6] < 400]
    if not good:
        return {"count": len(rows), "error_share": 1.0 if rows else None, "spark": []}
    ttft, e2el = sorted(r[4] for r in good), sorted(r[5] for r in good)
    busy = busy_seconds([(r[0], r[0] + r[5]) for r in good])
    tput = sum(r[1] for r in good) / busy if busy else None
    usd = endpoint.price_per_hour / (tput * 3600) * 1e6 if tput and endpoint.price_per_hour else None
    return {
        "count": len(rows),
        "error_share": 1 - len(good) / len(rows),
        "output_tput": tput,
        "p50_ttft_s": quantile(ttft, 0.5),
        "p95_ttft_s": quantile(ttft, 0.95),
        "p50_e2el_s": quantile(e2el, 0.5),
        "p95_e2el_s": quantile(e2el, 0.95),
        "cached_share": sum(r[3] for r in good) / max(1, sum(r[2] for r in good)),
        "usd_per_m": usd,
        "spark": [r[1] / r[5] for r in good[-40:] if r[5]],
        "versions": [r[7] for r in good[-40:] if r[5]],
    }


def busy_seconds(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def quantile(ordered: list[float], q: float) -> float:
    """Nearest-rank quantile of a sorted, non-empty list."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
