"""Writing and checking the audit log. Entries are hashed in a chain per organisation, so a change in the middle shows."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from django.contrib.auth.base_user import AbstractBaseUser
from django.db import transaction
from structlog.contextvars import get_contextvars

from polymorph_web.accounts.models import Organisation
from polymorph_web.audit.models import Entry

START = "0" * 64
SYSTEM = "system"


def record(
    organisation: Organisation,
    actor: AbstractBaseUser | None,
    action: str,
    target: str,
    *,
    reason: str = "",
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> Entry:
    """Appends an entry; `actor` None is the product itself. Writers queue on the organisation's row, so the chain is one."""
    with transaction.atomic():
        Organisation.objects.select_for_update().get(pk=organisation.pk)
        last = Entry.objects.filter(organisation=organisation).order_by("-seq").first()
        entry = Entry(
            organisation=organisation,
            seq=(last.seq if last else 0) + 1,
            at=round(time.time(), 3),
            actor=actor,
            actor_name=actor.get_username() if actor else SYSTEM,
            action=action,
            target=target,
            reason=reason,
            before=before or {},
            after=after or {},
            request_id=str(get_contextvars().get("request_id", "")),
            previous_hash=last.hash if last else START,
        )
        entry.hash = digest(entry)
        entry.save()
        return entry


def digest(entry: Entry) -> str:
    """sha256 over the entry's content and the hash before it, as canonical JSON."""
    content = [
        entry.organisation_id, entry.seq, entry.at, entry.actor_name, entry.action, entry.target, entry.reason,
        entry.before, entry.after, entry.request_id, entry.previous_hash,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def broken_at(organisation: Organisation) -> int | None:
    """The seq of the first entry that does not fit the chain, or None when it is intact."""
    previous, expected = START, 1
    for entry in Entry.objects.filter(organisation=organisation).order_by("seq").iterator():
        if entry.seq != expected or entry.previous_hash != previous or digest(entry) != entry.hash:
            return expected
        previous, expected = entry.hash, expected + 1
    return None
