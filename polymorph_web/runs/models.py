"""Optimisation runs. The database is the truth: lease, events and every measured candidate are rows."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models

LIVE_STATES = ("queued", "running")
MAX_ATTEMPTS = 3


class Run(models.Model):
    class State(models.TextChoices):
        QUEUED = "queued", "Queued"
        RUNNING = "running", "Running"
        SUCCEEDED = "succeeded", "Succeeded"
        NO_GAIN = "no_gain", "No gain found"
        FAILED = "failed", "Failed"
        CANCELLED = "cancelled", "Cancelled"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    endpoint = models.ForeignKey("endpoints.Endpoint", models.CASCADE, related_name="runs")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    created = models.DateTimeField(auto_now_add=True)
    started = models.DateTimeField(null=True)
    finished = models.DateTimeField(null=True)
    config = models.JSONField(default=dict)  # an optimizer RunConfig
    state = models.CharField(max_length=12, choices=State.choices, default=State.QUEUED)
    phase = models.CharField(max_length=20, default="queued")
    reason = models.TextField(blank=True)  # why it ended as it did, a sentence
    attempt = models.PositiveIntegerField(default=0)
    lease_owner = models.CharField(max_length=100, blank=True)
    lease_expires = models.FloatField(default=0.0)  # unix time
    cancel_requested = models.BooleanField(default=False)
    elapsed_s = models.FloatField(default=0.0)
    last_seq = models.PositiveIntegerField(default=0)
    report = models.JSONField(null=True)

    class Meta:
        ordering = ["-created"]
        indexes = [models.Index(fields=["state", "lease_expires"])]

    def __str__(self) -> str:
        return f"Run {str(self.id)[:8]}"

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES

    @property
    def budget_s(self) -> float:
        return float(self.config.get("budget_s", 0))

    @property
    def winner_hash(self) -> str:
        return ((self.report or {}).get("winner") or {}).get("artifact_hash", "") or ""


class RunEvent(models.Model):
    """The append-only log that live pages follow; `seq` counts from 1 within a run, without gaps."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="events")
    seq = models.PositiveIntegerField()
    at = models.FloatField()  # unix time
    kind = models.CharField(max_length=20)
    payload = models.JSONField(default=dict)

    class Meta:
        ordering = ["seq"]
        constraints = [models.UniqueConstraint(fields=["run", "seq"], name="one_event_a_seq")]


class RunRecord(models.Model):
    """A record of the search (`optimizer.records`) as JSON, upserted by kind and key."""

    KINDS = ("proposal", "candidate", "estimate", "experiment", "check", "post")

    run = models.ForeignKey(Run, models.CASCADE, related_name="records")
    kind = models.CharField(max_length=12)
    key = models.CharField(max_length=200)
    artifact_hash = models.CharField(max_length=64, blank=True, db_index=True)
    payload = models.JSONField()

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["run", "kind", "key"], name="one_record_a_key")]


class PublishedResults(models.Model):
    """Results that others published (InferenceX's JSON), drawn beside an organisation's own and never mixed with them."""

    organisation = models.ForeignKey("accounts.Organisation", models.CASCADE, related_name="published")
    name = models.CharField(max_length=200)  # of the file
    points = models.JSONField()  # optimizer.published.Published as JSON
    added_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["created"]

    def __str__(self) -> str:
        return self.name
