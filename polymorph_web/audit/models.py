"""The audit log: append only, each entry hashed over its content and the entry before it."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class Entry(models.Model):
    organisation = models.ForeignKey("accounts.Organisation", models.PROTECT, related_name="audit")
    seq = models.PositiveIntegerField()
    at = models.FloatField()  # unix time
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+")
    actor_name = models.CharField(max_length=150)  # "system" for what the product did by itself
    action = models.CharField(max_length=60)
    target = models.CharField(max_length=200)
    reason = models.TextField(blank=True)
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)
    request_id = models.CharField(max_length=64, blank=True)
    previous_hash = models.CharField(max_length=64)
    hash = models.CharField(max_length=64)

    class Meta:
        ordering = ["-seq"]
        constraints = [models.UniqueConstraint(fields=["organisation", "seq"], name="one_entry_a_seq")]
