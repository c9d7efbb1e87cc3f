"""Decisions about a run's result, and the change of a running endpoint that follows."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class Decision(models.Model):
    """An approval or a refusal of exactly one artefact. Void once the run's winner is another."""

    run = models.ForeignKey("runs.Run", models.CASCADE, related_name="decisions")
    artifact_hash = models.CharField(max_length=64)
    approved = models.BooleanField()
    reason = models.TextField()
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created"]


class Rollout(models.Model):
    """One change of what an endpoint serves, from `previous` to `version`.

    canary -> ready -> promoting -> done; canary and ready may be paused; canary, ready, paused and promoting may end
    rolled_back or aborted. A rollback by hand is a rollout of kind `rollback` that starts promoting at once.
    """

    class State(models.TextChoices):
        CANARY = "canary", "Canary"
        READY = "ready", "Ready to promote"
        PAUSED = "paused", "Paused"
        PROMOTING = "promoting", "Promoting"
        RETURNING = "returning", "Rolling back"
        DONE = "done", "Serving"
        ROLLED_BACK = "rolled_back", "Rolled back"
        ABORTED = "aborted", "Aborted"
        FAILED = "failed", "Failed"

    LIVE = ("canary", "ready", "paused", "promoting", "returning")

    endpoint = models.ForeignKey("endpoints.Endpoint", models.CASCADE, related_name="rollouts")
    kind = models.CharField(max_length=10, default="release")  # release | rollback
    decision = models.ForeignKey(Decision, models.SET_NULL, null=True, related_name="rollouts")
    version = models.ForeignKey("endpoints.Version", models.PROTECT, related_name="+")
    previous = models.ForeignKey("endpoints.Version", models.PROTECT, related_name="+")
    state = models.CharField(max_length=12, choices=State.choices, default=State.CANARY)
    share = models.FloatField(default=0.25)
    soak_requests = models.PositiveIntegerField(default=20)  # answered by each side before it may be promoted
    generation = models.PositiveIntegerField(default=0)  # of the plan now asked for
    comparison = models.JSONField(default=dict)  # canary against stable, see rollouts.canary
    hold = models.CharField(max_length=300, blank=True)  # why it does not move, a sentence
    note = models.TextField(blank=True)  # how it ended
    started_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+")
    reason = models.TextField(blank=True)
    created = models.DateTimeField(auto_now_add=True)
    changed = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["-created"]
        constraints = [
            models.UniqueConstraint(
                fields=["endpoint"],
                condition=models.Q(state__in=("canary", "ready", "paused", "promoting", "returning")),
                name="one_live_rollout",
            )
        ]

    @property
    def is_live(self) -> bool:
        return self.state in self.LIVE
