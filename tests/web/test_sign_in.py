"""Signing in with a password or a link, out again, and between organisations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connections
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from polymorph_web.accounts.models import Membership, Organisation, SignInLink, User

As = Callable[[str], Client]


def link(user: User) -> str:
    return reverse("sign_in_link", args=[SignInLink.issue(user)])


def signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def test_a_link_signs_in_once(people: dict[str, User], client: Client) -> None:
    url = link(people["viewer"])
    response = client.post(url)
    assert response["location"] == "/" and client.get("/").status_code == 200
    second = Client()
    response = second.post(url)
    assert response.status_code == 410 and not signed_in(second)
    assert "sign in" in response.content.decode().lower()


def test_looking_at_a_link_does_not_use_it_up(people: dict[str, User], client: Client) -> None:
    url = link(people["viewer"])
    for _ in range(3):  # a mail scanner, a preview, a person
        assert client.get(url).status_code == 200 and not signed_in(client)
    client.post(url)
    assert signed_in(client)


def test_only_one_of_two_clicks_at_once_signs_in(transactional_db: None, people: dict[str, User]) -> None:
    token, won, start = SignInLink.issue(people["viewer"]), [], threading.Barrier(3)

    def click() -> None:
        start.wait()
        won.append(SignInLink.consume(token))
        connections.close_all()

    threads = [threading.Thread(target=click) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(u is None for u in won) == [False, True, True]


def test_an_old_link_is_over(people: dict[str, User], client: Client) -> None:
    url = link(people["viewer"])
    SignInLink.objects.update(expires=timezone.now() - timedelta(seconds=1))
    assert client.get(url).status_code == client.post(url).status_code == 410
    assert not signed_in(client)


@pytest.mark.parametrize("token", ["nonsense", "x" * 500, "%00"])
def test_an_unknown_link_is_over(db: None, client: Client, token: str) -> None:
    assert client.post(f"/sign-in/link/{token}/").status_code == 410


def test_the_link_of_somebody_inactive_opens_nothing(people: dict[str, User], client: Client) -> None:
    url = link(people["viewer"])
    User.objects.filter(username="viewer").update(is_active=False)
    assert client.post(url).status_code == 410
    assert not signed_in(client)


def test_the_token_itself_is_not_stored(people: dict[str, User]) -> None:
    token = SignInLink.issue(people["viewer"])
    row = SignInLink.objects.get()
    assert token not in (row.token_hash, str(row.__dict__))


def test_a_password_signs_in(people: dict[str, User], client: Client) -> None:
    response = client.post(reverse("sign_in"), {"username": "viewer", "password": "secret of viewer"})
    assert response["location"] == "/" and signed_in(client)


@pytest.mark.parametrize(("username", "password"), [("viewer", "wrong"), ("nobody", "secret of viewer"), ("", "")])
def test_a_wrong_password_says_so_and_not_what_was_wrong(
    people: dict[str, User], client: Client, username: str, password: str
) -> None:
    response = client.post(reverse("sign_in"), {"username": username, "password": password})
    assert response.status_code == 200 and not signed_in(client)
    if username:
        assert "Please enter a correct username and password" in response.content.decode()
        assert f'value="{username}"' in response.content.decode()


def test_somebody_inactive_cannot_sign_in(people: dict[str, User], client: Client) -> None:
    User.objects.filter(username="viewer").update(is_active=False)
    client.post(reverse("sign_in"), {"username": "viewer", "password": "secret of viewer"})
    assert not signed_in(client)


@pytest.mark.parametrize(
    "where", ["https://evil.example/", "//evil.example", "javascript:alert(1)", "\\\\evil.example"]
)
@pytest.mark.parametrize("by", ["form", "address"])
def test_signing_in_never_leads_to_another_site(people: dict[str, User], client: Client, where: str, by: str) -> None:
    form = {"username": "viewer", "password": "secret of viewer"}
    query = {"next": where} if by == "address" else {}
    response = client.post(reverse("sign_in"), form | ({"next": where} if by == "form" else {}), query_params=query)
    assert response["location"] == "/"


def test_signing_in_leads_to_the_page_that_was_asked_for(people: dict[str, User], client: Client) -> None:
    asked = client.get("/audit/")
    html = client.get(asked["location"]).content.decode()
    assert 'name="next" value="/audit/"' in html
    form = {"username": "viewer", "password": "secret of viewer", "next": "/audit/"}
    assert client.post(reverse("sign_in"), form)["location"] == "/audit/"


def test_signing_out_ends_the_session(as_: As) -> None:
    client = as_("viewer")
    assert client.get("/sign-out/").status_code == 405 and signed_in(client)
    assert client.post("/sign-out/")["location"] == reverse("sign_in")
    assert not signed_in(client)


def test_switching_to_an_own_organisation(people: dict[str, User], as_: As) -> None:
    second = Organisation.objects.create(name="Zweite", slug="zweite")
    Membership.objects.create(user=people["viewer"], organisation=second, role="admin")
    client = as_("viewer")
    assert client.get("/").context["organisation"].slug == "acme"
    client.post("/organisations/switch/", {"organisation": "zweite"})
    assert client.get("/").context["organisation"] == second
    client.post("/organisations/switch/", {"organisation": "other"})
    assert client.get("/").context["organisation"] == second, "another's organisation cannot be chosen"


def test_roles_are_those_of_the_objects_organisation(people: dict[str, User], endpoint: object, as_: As) -> None:
    """Admin here is not admin there, whatever organisation the session looks at."""
    second = Organisation.objects.create(name="Zweite", slug="zweite")
    Membership.objects.create(user=people["viewer"], organisation=second, role="admin")
    client = as_("viewer")
    client.post("/organisations/switch/", {"organisation": "zweite"})
    assert client.get("/e/chat/optimise/").status_code == 403


def test_answers_tell_browsers_to_run_no_foreign_script(people: dict[str, User], as_: As) -> None:
    response = as_("viewer").get("/")
    policy = response["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert response["x-frame-options"] == "DENY"
    assert client_cookie_is_http_only(as_("viewer"))


def client_cookie_is_http_only(client: Client) -> bool:
    client.cookies.clear()
    client.post(reverse("sign_in"), {"username": "viewer", "password": "secret of viewer"})
    return bool(client.cookies["polymorph_session"]["httponly"])
