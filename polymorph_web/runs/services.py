"""Starting, stopping and repeating runs."""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from optimizer.config import RunConfig
from polymorph_web.accounts.models import User
from polymorph_web.audit import log as audit
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import LIVE_STATES, Run
from polymorph_web.runs.tasks import optimise


class Busy(Exception):
    """The endpoint has a run that has not ended: `run`. They would spoil each other's measurements."""

    def __init__(self, run: Run) -> None:
        super().__init__("This endpoint is being optimised already; here is that run.")
        self.run = run


def start_run(endpoint: Endpoint, user: User, chosen: dict[str, Any]) -> Run:
    """A queued run of `endpoint` from the optimise form's values, and the ring for it. Raises ConfigError, Busy."""
    run_id = uuid.uuid4()
    config = RunConfig(
        model=endpoint.model_path,
        traffic=endpoint.traffic,
        data_dir=str(settings.DATA_DIR),
        run_id=str(run_id),
        name=endpoint.name,
        dtype=endpoint.dtype,
        objective=endpoint.objective,
        budget_s=chosen["budget_minutes"] * 60,
        tolerance=chosen["tolerance"],
        foci=tuple(chosen["foci"]),
        seed=chosen.get("seed") or 0,
        slo={k: v for k, v in endpoint.slo.items() if v},
        price_per_hour=endpoint.price_per_hour,
        llm=_language_model(chosen),
    )
    return _create(run_id, endpoint, user, config.to_json())


def _language_model(chosen: dict[str, Any]) -> dict[str, Any]:
    """`RunConfig.llm` of the form's values: its address and key are the worker's."""
    offer = settings.LLM_OFFER
    return {"model": offer["model"], "max_usd": chosen["llm_max_usd"]} if offer and chosen.get("llm") else {}


def repeat_run(run: Run, user: User) -> Run:
    """A queued run with the choices of `run`. Raises Busy."""
    run_id = uuid.uuid4()
    return _create(run_id, run.endpoint, user, run.config | {"run_id": str(run_id)})


def cancel_run(run: Run, user: User) -> None:
    """A queued run ends at once; a running one is stopped by its worker."""
    with transaction.atomic():
        Run.objects.filter(id=run.id, state__in=LIVE_STATES).update(cancel_requested=True)
        Run.objects.filter(id=run.id, state=Run.State.QUEUED).update(
            state=Run.State.CANCELLED, reason="Cancelled before it started.", finished=timezone.now(), phase="done"
        )
        audit.record(run.endpoint.organisation, user, "run.cancel", f"run {run.id}")


def _create(run_id: uuid.UUID, endpoint: Endpoint, user: User, config: dict[str, Any]) -> Run:
    with transaction.atomic():
        Endpoint.objects.select_for_update().get(pk=endpoint.pk)  # two clicks at once: the second finds the first's run
        running = endpoint.runs.filter(state__in=LIVE_STATES).first()
        if running is not None:
            raise Busy(running)
        run = Run.objects.create(id=run_id, endpoint=endpoint, created_by=user, config=config)
        shown = {k: config[k] for k in ("budget_s", "tolerance", "foci", "seed")}
        shown |= {"llm": config["llm"]} if config.get("llm") else {}
        audit.record(endpoint.organisation, user, "run.start", f"run {run.id} of {endpoint.slug}", after=shown)
        optimise.delay_on_commit(str(run.id))
    return run


def add_published(run: Run, user: User, name: str, points: list[dict[str, Any]]) -> None:
    """Others' results, drawn on every report of the run's organisation."""
    organisation = run.endpoint.organisation
    organisation.published.create(name=name[:200], points=points, added_by=user)
    audit.record(organisation, user, "published.add", name[:200], after={"results": len(points)})


def remove_published(run: Run, user: User, results_id: int) -> None:
    organisation = run.endpoint.organisation
    found = organisation.published.filter(id=results_id).first()
    if found is not None:
        found.delete()
        audit.record(organisation, user, "published.remove", found.name, before={"results": len(found.points)})
