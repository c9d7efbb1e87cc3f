"""The queue. A task carries a run's id and nothing else: the database is the truth, the broker a doorbell."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "polymorph_web.settings")

app = Celery("polymorph")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["polymorph_web.runs"])
