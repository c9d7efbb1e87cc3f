"""People, organisations and who has which role in which."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone

LINK_LIFETIME = timedelta(hours=12)


class User(AbstractUser):
    """A person who signs in. Staff may read every organisation's run histories."""


class Role(models.TextChoices):
    VIEWER = "viewer", "Viewer"
    MEMBER = "member", "Member"
    APPROVER = "approver", "Approver"
    ADMIN = "admin", "Admin"


RANK = {role: i for i, role in enumerate(Role.values)}


class Organisation(models.Model):
    name = models.CharField(max_length=120)
    slug = models.SlugField(unique=True)
    self_approval = models.BooleanField(default=False, help_text="Whether who started a run may approve its result.")
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    user = models.ForeignKey(User, models.CASCADE, related_name="memberships")
    organisation = models.ForeignKey(Organisation, models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=12, choices=Role.choices, default=Role.VIEWER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "organisation"], name="one_role_each")]

    def may(self, role: str) -> bool:
        """Whether this membership includes `role`: each role includes those before it."""
        return RANK[self.role] >= RANK[role]


class SignInLink(models.Model):
    """A link that signs one user in once. Only its hash is kept."""

    user = models.ForeignKey(User, models.CASCADE, related_name="sign_in_links")
    token_hash = models.CharField(max_length=64, unique=True)
    expires = models.DateTimeField()
    used_at = models.DateTimeField(null=True)

    @classmethod
    def issue(cls, user: User) -> str:
        """A fresh token for `user`."""
        token = secrets.token_urlsafe(32)
        cls.objects.create(user=user, token_hash=cls.hashed(token), expires=timezone.now() + LINK_LIFETIME)
        return token

    @classmethod
    def live(cls, token: str) -> models.QuerySet[SignInLink]:
        return cls.objects.filter(token_hash=cls.hashed(token), used_at=None, expires__gt=timezone.now())

    @classmethod
    def consume(cls, token: str) -> User | None:
        """The link's user, for the first caller only."""
        link = cls.live(token).select_related("user").first()
        if link is None or not cls.live(token).update(used_at=timezone.now()):
            return None
        return link.user

    @staticmethod
    def hashed(token: str) -> str:
        return hashlib.sha256(token.encode()).hexdigest()
