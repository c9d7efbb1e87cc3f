"""A link that signs one user in, once."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.urls import reverse

from polymorph_web.accounts.models import SignInLink, User


class Command(BaseCommand):
    help = "Prints a link that signs a user in once, within twelve hours."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("username", nargs="?", default="demo")
        parser.add_argument("--base", default="http://127.0.0.1:8000", help="address of the pages")

    def handle(self, *args: Any, **options: Any) -> None:
        user = User.objects.filter(username=options["username"], is_active=True).first()
        if user is None:
            raise CommandError(f"There is no active user called {options['username']!r}.")
        self.stdout.write(options["base"].rstrip("/") + reverse("sign_in_link", args=[SignInLink.issue(user)]))
