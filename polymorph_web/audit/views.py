"""The audit log of an organisation: shown, searched, exported."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from typing import Any

from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from polymorph_web.accounts.access import require_membership
from polymorph_web.accounts.models import Organisation
from polymorph_web.audit.log import broken_at
from polymorph_web.audit.models import Entry

COLUMNS = ("seq", "at", "actor", "action", "target", "reason", "before", "after", "request_id", "hash")


def _search(organisation: Organisation, q: str) -> QuerySet[Entry]:
    found = Entry.objects.filter(organisation=organisation)
    for word in q.split():
        found = found.filter(
            Q(actor_name__icontains=word)
            | Q(action__icontains=word)
            | Q(target__icontains=word)
            | Q(reason__icontains=word)
        )
    return found


@login_required
@require_GET
def entries(request: HttpRequest) -> HttpResponse:
    organisation = require_membership(request).organisation
    q = request.GET.get("q", "").strip()
    page = Paginator(_search(organisation, q), 50).get_page(request.GET.get("page"))
    broken = broken_at(organisation)
    context = {"entries": page.object_list, "page_obj": page, "q": q, "intact": broken is None, "broken_at": broken}
    return render(request, "audit/list.html", context)


@login_required
@require_GET
def export(request: HttpRequest, form: str) -> HttpResponse:
    organisation = require_membership(request).organisation
    rows = [_row(e) for e in Entry.objects.filter(organisation=organisation).order_by("seq")]
    if form == "json":
        response = HttpResponse(json.dumps(rows, indent=1), content_type="application/json")
    elif form == "csv":
        response = HttpResponse(content_type="text/csv")
        writer = csv.writer(response)
        writer.writerow(COLUMNS)
        writer.writerows([_cell(r[c]) for c in COLUMNS] for r in rows)
    else:
        raise Http404("An export is csv or json.")
    response["Content-Disposition"] = f'attachment; filename="audit-{organisation.slug}.{form}"'
    return response


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    text = json.dumps(value) if isinstance(value, dict) else value
    return f"'{text}" if isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _row(entry: Entry) -> dict[str, Any]:
    at = datetime.fromtimestamp(entry.at, UTC).isoformat()
    plain = {c: getattr(entry, c) for c in COLUMNS if c not in ("at", "actor")}
    return {"at": at, "actor": entry.actor_name, **plain}
