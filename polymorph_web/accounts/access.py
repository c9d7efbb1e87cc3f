"""Who may see and do what. Every view gets its objects here: what is not yours is not there (404); what your role may not
do is refused (403).
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest

from polymorph_web.accounts.models import Membership, Organisation, User
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.rollouts.models import Rollout
from polymorph_web.runs.models import Run


def memberships(user: User) -> QuerySet[Membership]:
    return user.memberships.select_related("organisation").order_by("organisation__name")


def current_membership(request: HttpRequest) -> Membership | None:
    """The membership of the organisation this session looks at; the first one by name until another is chosen."""
    if not request.user.is_authenticated:
        return None
    if not hasattr(request, "_membership"):
        own = list(memberships(request.user))
        chosen = request.session.get("organisation")
        request._membership = next((m for m in own if m.organisation.slug == chosen), own[0] if own else None)
    return request._membership


def require_membership(request: HttpRequest, role: str = "viewer") -> Membership:
    membership = current_membership(request)
    if membership is None:
        raise Http404("You belong to no organisation.")
    if not membership.may(role):
        raise PermissionDenied(f"This needs the role {role}; you are {membership.role} of {membership.organisation}.")
    return membership


def may(user: User, organisation: Organisation, role: str) -> bool:
    membership = Membership.objects.filter(user=user, organisation=organisation).first()
    return membership is not None and membership.may(role)


def _check(user: User, organisation: Organisation, role: str) -> None:
    membership = Membership.objects.filter(user=user, organisation=organisation).first()
    if membership is None:
        raise Http404("Not found.")
    if not membership.may(role):
        raise PermissionDenied(f"This needs the role {role}; you are {membership.role} of {organisation}.")


def get_endpoint(user: User, slug: str, role: str = "viewer") -> Endpoint:
    endpoint = Endpoint.objects.select_related("organisation", "serving").filter(slug=slug).first()
    if endpoint is None:
        raise Http404("Not found.")
    _check(user, endpoint.organisation, role)
    return endpoint


def get_run(user: User, run_id: Any, role: str = "viewer") -> Run:
    """Staff may read every organisation's runs, and do nothing to them."""
    run = Run.objects.select_related("endpoint__organisation", "created_by").filter(id=run_id).first()
    if run is None:
        raise Http404("Not found.")
    if not (role == "viewer" and user.is_staff):
        _check(user, run.endpoint.organisation, role)
    return run


def get_rollout(user: User, rollout_id: int, role: str = "viewer") -> Rollout:
    found = Rollout.objects.select_related("endpoint__organisation", "version", "previous", "decision__run")
    rollout = found.filter(id=rollout_id).first()
    if rollout is None:
        raise Http404("Not found.")
    _check(user, rollout.endpoint.organisation, role)
    return rollout
