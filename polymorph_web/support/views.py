"""What support staff read: every organisation's runs. Nothing here can be changed."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from polymorph_web.runs.models import Run


@login_required
@require_GET
def runs(request: HttpRequest) -> HttpResponse:
    if not request.user.is_staff:
        raise Http404("Not found.")
    q = request.GET.get("q", "").strip()
    found = Run.objects.select_related("endpoint__organisation", "created_by").defer("report", "config")
    for word in q.split():
        found = found.filter(
            Q(endpoint__slug__icontains=word)
            | Q(endpoint__organisation__name__icontains=word)
            | Q(state__icontains=word)
            | Q(reason__icontains=word)
            | Q(id__icontains=word)
        )
    page = Paginator(found, 50).get_page(request.GET.get("page"))
    return render(request, "support/list.html", {"runs": page.object_list, "page_obj": page, "q": q})
