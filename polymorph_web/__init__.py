"""The Django project: who may do what, what was decided, what people see. Holds no torch."""

from polymorph_web.celery import app as celery_app

__all__ = ["celery_app"]
