"""A demo organisation with one user and the endpoint `demo`, made once; running it again changes nothing."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from engine.models.errors import ModelError
from polymorph_web.accounts.models import Membership, Organisation, Role, User
from polymorph_web.endpoints.services import demo_endpoint

SLUG, USERNAME = "demo", "demo"


class Command(BaseCommand):
    help = "Makes the demo organisation, its user and the endpoint `demo`, unless they are there."

    def handle(self, *args: Any, **options: Any) -> None:
        user, made = User.objects.get_or_create(username=USERNAME, defaults={"is_staff": True})
        if made:
            user.set_unusable_password()
            user.save(update_fields=["password"])
        organisation, _ = Organisation.objects.get_or_create(
            slug=SLUG, defaults={"name": "Demo", "self_approval": True}
        )
        Membership.objects.get_or_create(user=user, organisation=organisation, defaults={"role": Role.ADMIN})
        try:
            demo_endpoint(organisation, user)
        except ModelError as error:
            self.stderr.write(f"The demo endpoint was not made: {error}")
