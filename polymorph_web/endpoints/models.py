"""Endpoints, the versions of their forward pass, and the shapes of the requests they answered."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import models


class Endpoint(models.Model):
    """A dedicated endpoint. `slug` is the model name that clients send, so it is unique across organisations."""

    organisation = models.ForeignKey("accounts.Organisation", models.CASCADE, related_name="endpoints")
    slug = models.SlugField(max_length=60, unique=True)
    name = models.CharField(max_length=120)
    model_ref = models.CharField(max_length=500)
    model_path = models.CharField(max_length=1000)
    dtype = models.CharField(max_length=12, default="bfloat16")
    hardware = models.JSONField(default=dict)
    traffic = models.JSONField(default=dict)  # an optimizer TrafficProfile
    slo = models.JSONField(default=dict)  # ttft_s, tpot_s
    objective = models.CharField(max_length=40, default="output_throughput")
    price_per_hour = models.FloatField(default=0.0)  # USD, of the device
    probe_traffic = models.BooleanField(
        default=False, help_text="Whether an idle endpoint may be sent requests of its own profile."
    )
    serving = models.ForeignKey("Version", models.SET_NULL, null=True, related_name="+")
    generation = models.PositiveIntegerField(default=0)
    problem = models.CharField(max_length=500, blank=True)  # what the gateway last said was wrong
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name

    @property
    def price_text(self) -> str:
        return f"${self.price_per_hour:.2f}/h"


class Version(models.Model):
    """A forward pass that an endpoint can serve. Number 0 is the baseline. Versions are never deleted."""

    endpoint = models.ForeignKey(Endpoint, models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    artifact_hash = models.CharField(max_length=64)
    name = models.CharField(max_length=200)
    run = models.ForeignKey("runs.Run", models.SET_NULL, null=True, related_name="versions")
    gain: models.JSONField[Any] = models.JSONField(default=dict)  # ratio, ci_low, ci_high over the baseline
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-number"]
        constraints = [models.UniqueConstraint(fields=["endpoint", "number"], name="one_version_number")]

    def __str__(self) -> str:
        return self.version_id

    @property
    def version_id(self) -> str:
        """What every response carries in `x-polymorph-version`."""
        return "baseline" if self.number == 0 else f"v{self.number}"


class RequestShape(models.Model):
    """One answered request as the gateway recorded it. Never its text."""

    endpoint = models.ForeignKey(Endpoint, models.CASCADE, related_name="requests")
    ts = models.FloatField()
    version_id = models.CharField(max_length=40)
    role = models.CharField(max_length=10)
    isl = models.PositiveIntegerField()
    osl = models.PositiveIntegerField()
    cached_tokens = models.PositiveIntegerField(default=0)
    ttft_s = models.FloatField()
    e2el_s = models.FloatField()
    status = models.PositiveSmallIntegerField()

    class Meta:
        indexes = [models.Index(fields=["endpoint", "ts"])]


class Spool(models.Model):
    """How far the gateway's record file of an endpoint has been read."""

    endpoint = models.OneToOneField(Endpoint, models.CASCADE, related_name="spool")
    offset = models.BigIntegerField(default=0)
