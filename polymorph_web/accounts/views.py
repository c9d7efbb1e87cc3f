"""Signing in and out, and choosing the organisation to look at."""

from __future__ import annotations

from django.contrib.auth import login, logout
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import AuthenticationForm
from django.db import connection
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from polymorph_web.accounts.access import memberships
from polymorph_web.accounts.models import SignInLink


@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
def sign_in(request: HttpRequest) -> HttpResponse:
    form = AuthenticationForm(request, request.POST or None)
    if request.method == "POST" and form.is_valid():
        login(request, form.get_user())
        return redirect(_next(request))
    return render(request, "accounts/sign_in.html", {"form": form, "next": request.GET.get("next", "")})


@require_http_methods(["GET", "POST"])
def sign_in_link(request: HttpRequest, token: str) -> HttpResponse:
    """GET only shows a button, so that a mail scanner or preview does not use the link up."""
    if request.method == "POST":
        user = SignInLink.consume(token)
        if user is not None and user.is_active:
            login(request, user, backend="django.contrib.auth.backends.ModelBackend")
            return redirect("fleet")
    valid = SignInLink.live(token).exists()
    return render(request, "accounts/link.html", {"valid": valid}, status=200 if valid else 410)


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return redirect("sign_in")


@login_required
@require_POST
def switch_organisation(request: HttpRequest) -> HttpResponse:
    slug = request.POST.get("organisation", "")
    if not memberships(request.user).filter(organisation__slug=slug).exists():
        raise Http404("Not found.")
    request.session["organisation"] = slug
    return redirect("fleet")


@require_GET
def health(request: HttpRequest) -> HttpResponse:
    connection.ensure_connection()
    return JsonResponse({"ok": True})


def _next(request: HttpRequest) -> str:
    url = request.POST.get("next") or request.GET.get("next") or ""
    return url if url_has_allowed_host_and_scheme(url, {request.get_host()}) else "/"
