"""Celery tasks: thin adapters from a Run row to the optimizer. A task carries only the run's id."""

from __future__ import annotations

import os
import socket
import time
import traceback
from pathlib import Path

import structlog
from celery import shared_task

from optimizer.config import ConfigError, RunConfig
from optimizer.store import Lease, LeaseLost
from polymorph_web.audit import log as audit
from polymorph_web.runs.models import LIVE_STATES, MAX_ATTEMPTS, Run
from polymorph_web.runs.store import DjangoRunStore

log = structlog.get_logger(__name__)
LEASE_TTL_S = 15.0


@shared_task(name="runs.optimise", acks_late=False, ignore_result=True)
def optimise(run_id: str) -> None:
    """Claims the run, if nobody else holds it, and searches until it ends."""
    from optimizer.search import Search

    store = DjangoRunStore()
    lease = store.claim(run_id, worker_name(), LEASE_TTL_S)
    if lease is None:
        return
    log.info("run claimed", run_id=run_id, attempt=lease.attempt)
    try:
        config = RunConfig.from_json(store.load(run_id).config)
        Search(config, store).run(lease)
    except LeaseLost:
        log.warning("run taken over by another worker", run_id=run_id)
        return
    except ConfigError as error:
        _end(store, lease, str(error))
    except Exception as error:
        log.error("run failed", run_id=run_id, trace=traceback.format_exc())
        _end(store, lease, f"The search stopped with an error: {type(error).__name__}: {error}")
    _audit(run_id)


def worker_name() -> str:
    """Names this worker in a lease: machine, process, and a moment, since process ids come again."""
    return f"{socket.gethostname()}:{os.getpid()}:{time.time_ns()}"


def _end(store: DjangoRunStore, lease: Lease, reason: str) -> None:
    """Ends the run unless the search already did."""
    try:
        store.append_event(lease, "log", {"level": "error", "text": reason})
        store.append_event(lease, "finished", {"outcome": "failed", "reason": reason})
        store.finish(lease, "failed", reason)
    except LeaseLost:
        log.warning("run had ended already", reason=reason)


def _audit(run_id: str) -> None:
    run = Run.objects.select_related("endpoint__organisation").get(id=run_id)
    if not run.is_live:
        speedup = (run.report or {}).get("speedup") or {}
        audit.record(
            run.endpoint.organisation, None, f"run.{run.state}", f"run {run.id}", reason=run.reason, after=speedup
        )


def reap() -> int:
    """Rings for queued runs and for running ones whose worker is gone; fails those that had all their attempts.

    Returns how many runs it touched. Called every few seconds by the conductor.
    """
    touched = 0
    now = time.time()
    _end_leases_of_the_dead(now)
    for run in Run.objects.filter(state__in=LIVE_STATES, lease_expires__lt=now).select_related(
        "endpoint__organisation"
    ):
        if run.state == Run.State.RUNNING and run.attempt >= MAX_ATTEMPTS:
            touched += _give_up(run)
        elif _due(run, now):
            optimise.delay(str(run.id))
            touched += 1
    return touched


def _end_leases_of_the_dead(now: float) -> None:
    """A worker of this machine whose process ended holds no run any longer; elsewhere only the lease's time tells."""
    for run in Run.objects.filter(state=Run.State.RUNNING, lease_expires__gte=now):
        host, _, rest = run.lease_owner.partition(":")
        pid = rest.partition(":")[0]
        if host == socket.gethostname() and pid.isdigit() and not Path("/proc", pid).exists():
            Run.objects.filter(id=run.id, lease_owner=run.lease_owner).update(lease_expires=0)
            log.warning("the worker of a run is gone", run_id=str(run.id), worker=run.lease_owner)


def _give_up(run: Run) -> int:
    """Fails a run in a worker's place, so that its page and the audit log hear of it. Returns 1 unless it was taken."""
    reason = (
        f"The worker was lost {run.attempt} times while it searched; what was measured is kept. Start the run again."
    )
    store = DjangoRunStore()
    lease = store.claim(str(run.id), "conductor", LEASE_TTL_S)
    if lease is None:
        return 0
    _end(store, lease, reason)
    Run.objects.filter(id=run.id, state=Run.State.FAILED).update(attempt=run.attempt)
    _audit(str(run.id))
    return 1


_rung: dict[object, float] = {}


def _due(run: Run, now: float) -> bool:
    """A doorbell is rung at most every 10 s: the queue may be long, and a ring that finds the run held does nothing."""
    key = (run.id, run.attempt)
    if now - _rung.get(key, 0) < 10 or (run.state == Run.State.QUEUED and now - run.created.timestamp() < 3):
        return False
    _rung[key] = now
    return True
