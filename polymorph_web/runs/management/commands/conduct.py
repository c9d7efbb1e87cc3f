"""The conductor: rings for waiting runs, reaps lost ones, reads the gateway's records, moves rollouts along."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import structlog
from django.core.management.base import BaseCommand
from django.db import close_old_connections

from polymorph_web.endpoints import gateway, services
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.rollouts import probe
from polymorph_web.rollouts import services as rollouts
from polymorph_web.rollouts.models import Rollout
from polymorph_web.runs.tasks import reap

log = structlog.get_logger(__name__)
PAUSE_S = 1.0
REGISTER_EVERY = 10  # rounds between looks at endpoints whose gateway had a problem


class Command(BaseCommand):
    help = "Rings for waiting runs, reaps lost ones, reads request records and moves rollouts along, until stopped."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--once", action="store_true", help="one round, then end")

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        if not options["once"]:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
        turn = 0
        while True:
            round_of_work(turn)
            turn += 1
            if options["once"] or stop.wait(PAUSE_S):
                return


def round_of_work(turn: int = 0) -> None:
    """One look at everything. A part that fails is logged and does not keep the others from their turn."""
    close_old_connections()
    _attempt("reaping", reap)
    for endpoint in Endpoint.objects.all():
        _attempt(f"records of {endpoint.slug}", lambda e=endpoint: services.ingest(e))
        if turn % REGISTER_EVERY == 0:
            _attempt(f"gateway of {endpoint.slug}", lambda e=endpoint: services.register(e))
    for rollout in Rollout.objects.filter(state__in=Rollout.LIVE).select_related(
        "endpoint__organisation", "version", "previous"
    ):
        _attempt(f"rollout {rollout.pk}", lambda r=rollout: step(r))


def step(rollout: Rollout) -> None:
    rollouts.advance(rollout)
    rollout.refresh_from_db()
    ready = any(s["role"] == "canary" and s["state"] == "ready" for s in gateway.status(rollout.endpoint)["servers"])
    if rollout.state == Rollout.State.CANARY and ready and rollout.endpoint.probe_traffic:
        probe.probe(rollout)


def _attempt(what: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except gateway.GatewayError as error:
        log.info("gateway not available", what=what, error=str(error))
    except Exception:
        log.exception("conductor", what=what)
