"""What every page's shell shows."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from polymorph_web.accounts.access import current_membership, memberships


def shell(request: HttpRequest) -> dict[str, Any]:
    """Organisation, role and the section that the address lies in."""
    membership = current_membership(request) if hasattr(request, "user") else None
    section = request.path.strip("/").split("/")[0] or "fleet"
    nav = {"e": "fleet", "endpoints": "fleet", "runs": "fleet", "rollouts": "fleet"}.get(section, section)
    if membership is None:
        return {"organisation": None, "organisations": [], "membership": None, "nav": nav}
    own = [m.organisation for m in memberships(request.user)]
    return {"organisation": membership.organisation, "organisations": own, "membership": membership, "nav": nav}
