"""`optimizer.store.RunStore` over the database. A write checks the lease and happens in one short transaction."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from optimizer.records import Candidate, Check, Estimate, Experiment, Post, Proposal, State, Verdict, clean, to_json
from optimizer.store import Lease, LeaseLost, RunState
from polymorph_web.runs.models import LIVE_STATES, Run, RunEvent, RunRecord

TYPES: dict[str, type] = {
    "proposal": Proposal,
    "candidate": Candidate,
    "estimate": Estimate,
    "experiment": Experiment,
    "check": Check,
    "post": Post,
}
ENUMS = {"state": State, "verdict": Verdict}


def group_name(run_id: Any) -> str:
    return f"run_{run_id}".replace("-", "")


class DjangoRunStore:
    """Stateless: every instance sees the same runs."""

    def claim(self, run_id: str, owner: str, ttl_s: float) -> Lease | None:
        now = time.time()
        free = Q(lease_expires__lt=now) | Q(lease_owner="")
        claimed = Run.objects.filter(free, id=run_id, state__in=LIVE_STATES).update(
            lease_owner=owner, lease_expires=now + ttl_s, attempt=F("attempt") + 1, state=Run.State.RUNNING
        )
        if not claimed:
            return None
        Run.objects.filter(id=run_id, started=None).update(started=timezone.now())
        attempt = Run.objects.values_list("attempt", flat=True).get(id=run_id)
        return Lease(str(run_id), owner, attempt, now + ttl_s)

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        expires = time.time() + ttl_s
        if not self._held(lease).update(lease_expires=expires):
            raise LeaseLost(lease.run_id)
        return replace(lease, expires=expires)

    def finish(self, lease: Lease, outcome: str, reason: str = "") -> None:
        ended = self._held(lease).update(
            state=outcome, reason=reason, finished=timezone.now(), lease_owner="", lease_expires=0, phase="done"
        )
        if not ended:
            raise LeaseLost(lease.run_id)
        self._ring(lease.run_id)

    def cancelled(self, run_id: str) -> bool:
        return Run.objects.filter(id=run_id, cancel_requested=True).exists()

    def append_event(self, lease: Lease, kind: str, payload: dict[str, Any]) -> int:
        with transaction.atomic():
            run = self._lock(lease)
            run.last_seq += 1
            RunEvent.objects.create(run=run, seq=run.last_seq, at=time.time(), kind=kind, payload=clean(payload))
            run.save(update_fields=["last_seq"])
        self._ring(lease.run_id)
        return run.last_seq

    def events(self, run_id: str, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        rows = RunEvent.objects.filter(run_id=run_id, seq__gt=after).order_by("seq")[:limit]
        return list(rows.values("seq", "at", "kind", "payload"))

    def put_proposal(self, lease: Lease, proposal: Proposal) -> None:
        self._put(lease, "proposal", proposal.id, proposal)

    def put_candidate(self, lease: Lease, candidate: Candidate) -> None:
        self._put(lease, "candidate", candidate.artifact_hash, candidate)

    def put_estimate(self, lease: Lease, estimate: Estimate) -> None:
        self._put(lease, "estimate", estimate.artifact_hash, estimate)

    def put_experiment(self, lease: Lease, experiment: Experiment) -> None:
        self._put(lease, "experiment", experiment.id, experiment)

    def put_checks(self, lease: Lease, checks: list[Check]) -> None:
        with transaction.atomic():
            for check in checks:
                self._put(lease, "check", f"{check.artifact_hash}:{check.check}:{check.case}"[:200], check)

    def put_post(self, lease: Lease, post: Post) -> None:
        self._put(lease, "post", post.id, post)

    def put_report(self, lease: Lease, report: dict[str, Any]) -> None:
        if not self._held(lease).update(report=clean(report)):
            raise LeaseLost(lease.run_id)

    def set_progress(self, lease: Lease, phase: str, elapsed_s: float) -> None:
        if not self._held(lease).update(phase=phase, elapsed_s=elapsed_s):
            raise LeaseLost(lease.run_id)

    def load(self, run_id: str) -> RunState:
        run = Run.objects.filter(id=run_id).first()
        if run is None:
            raise KeyError(run_id)
        kinds: dict[str, list[Any]] = {kind: [] for kind in TYPES}
        for record in run.records.order_by("id"):
            kinds[record.kind].append(restore(record.kind, record.payload))
        plural = {f"{kind}s": found for kind, found in kinds.items()}
        return RunState(str(run.id), run.config, run.phase, **plural, report=run.report, elapsed_s=run.elapsed_s)

    def _put(self, lease: Lease, kind: str, key: str, record: Any) -> None:
        with transaction.atomic():
            run = self._lock(lease)
            values = {"payload": to_json(record), "artifact_hash": getattr(record, "artifact_hash", "")}
            RunRecord.objects.update_or_create(run=run, kind=kind, key=key, defaults=values)

    def _held(self, lease: Lease) -> Any:
        return Run.objects.filter(
            id=lease.run_id, lease_owner=lease.owner, attempt=lease.attempt, state=Run.State.RUNNING
        )

    def _lock(self, lease: Lease) -> Run:
        """The run's row, locked, so that events of a run get their numbers one after another."""
        run = self._held(lease).select_for_update().only("id", "last_seq").first()
        if run is None:
            raise LeaseLost(lease.run_id)
        return run

    def _ring(self, run_id: str) -> None:
        """Wakes the sockets that follow this run; they read the log themselves, so a lost ring costs half a second."""
        layer = get_channel_layer()
        if settings.CHANNEL_REDIS_URL and layer is not None:
            async_to_sync(layer.group_send)(group_name(run_id), {"type": "run.wake"})


def restore(kind: str, payload: dict[str, Any]) -> Any:
    """A record from its stored JSON; fields that a newer version dropped are ignored."""
    known = {f.name for f in fields(TYPES[kind])}
    values = {k: ENUMS[k](v) if k in ENUMS and v is not None else v for k, v in payload.items() if k in known}
    return TYPES[kind](**values)
