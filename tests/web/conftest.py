"""People, an endpoint, runs and rollouts; a data folder and a queue of the test's own; a gateway that only listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from django.db import connection, connections
from django.test import Client

from engine.artifacts import ArtifactStore
from optimizer.traffic.sources import presets
from polymorph_web.accounts.models import Membership, Organisation, User
from polymorph_web.celery import app
from polymorph_web.endpoints.models import Endpoint, Version
from polymorph_web.endpoints.services import hardware
from polymorph_web.rollouts import services as rollouts
from polymorph_web.rollouts.models import Decision, Rollout
from polymorph_web.runs.models import Run
from tests.web import runs
from tests.web.gateway import TOKEN, Gateway

ROLES = ("viewer", "member", "approver", "admin")


@pytest.fixture(scope="session")
def django_db_modify_db_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SQLite in a file, as the product runs it: threads and sockets have connections of their own."""
    if connection.vendor == "sqlite":
        connections["default"].settings_dict["TEST"]["NAME"] = str(tmp_path_factory.mktemp("db") / "test.sqlite3")


@pytest.fixture(scope="session", autouse=True)
def _queue(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The embedded queue lies in a temporary folder; Redis, where it is set, is the tests' own."""
    if app.conf.broker_url == "filesystem://":
        folders = {name: tmp_path_factory.mktemp(name) for name in ("queue", "processed", "control")}
        app.conf.broker_transport_options = {
            "data_folder_in": str(folders["queue"]),
            "data_folder_out": str(folders["queue"]),
            "processed_folder": str(folders["processed"]),
            "control_folder": str(folders["control"]),
        }


@pytest.fixture(autouse=True)
def data(tmp_path: Path, settings: Any) -> Path:
    """The data folder; no gateway listens unless a test asks for one."""
    folder = tmp_path / "data"
    folder.mkdir()
    settings.DATA_DIR = folder
    settings.GATEWAY_URL = "http://127.0.0.1:9"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return folder


@pytest.fixture
def rings() -> Iterator[Callable[[], list[Any]]]:
    """Takes the doorbells rung so far off the real queue: the arguments of each."""
    with app.connection_for_read() as broker:
        queue = broker.SimpleQueue("celery")
        queue.clear()

        def taken() -> list[Any]:
            found = []
            with contextlib.suppress(Empty):
                while True:
                    message = queue.get_nowait()
                    message.ack()
                    found.append(message.payload[:2])
            return found

        yield taken
        queue.clear()
        queue.close()


@pytest.fixture
def organisation(db: None) -> Organisation:
    return Organisation.objects.create(name="Acme & Söhne", slug="acme")


@pytest.fixture
def people(organisation: Organisation) -> dict[str, User]:
    """One of every role, `stranger` (admin of another organisation), `loner` (of none) and `staff` (of none)."""
    found = {}
    for name in (*ROLES, "stranger", "loner", "staff"):
        found[name] = User.objects.create_user(name, password=f"secret of {name}", is_staff=name == "staff")
    for role in ROLES:
        Membership.objects.create(user=found[role], organisation=organisation, role=role)
    other = Organisation.objects.create(name="Other", slug="other")
    Membership.objects.create(user=found["stranger"], organisation=other, role="admin")
    return found


@pytest.fixture
def as_(people: dict[str, User]) -> Callable[[str], Client]:
    """A signed-in client; `anonymous` is nobody's."""

    def client(name: str) -> Client:
        client = Client()
        if name != "anonymous":
            client.force_login(people[name])
        return client

    return client


@pytest.fixture
def endpoint(organisation: Organisation, people: dict[str, User], data: Path, tiny_model: Path) -> Endpoint:
    found = Endpoint.objects.create(
        organisation=organisation,
        slug="chat",
        name="Chat <prod>",
        model_ref=str(tiny_model),
        model_path=str(tiny_model),
        dtype="float32",
        hardware=hardware(),
        traffic=presets()["demo"].clipped(512).to_json(),
        slo={"ttft_s": 2.0, "tpot_s": 0.1},
        price_per_hour=0.2,
        created_by=people["admin"],
    )
    found.serving = Version.objects.create(
        endpoint=found, number=0, artifact_hash=ArtifactStore(data).baseline().hash, name="Baseline"
    )
    found.save()
    return found


@pytest.fixture
def run(endpoint: Endpoint, people: dict[str, User]) -> Run:
    """A finished run with a verified winner, started by the member."""
    return runs.succeeded(runs.queued_run(endpoint, people["member"]))


@pytest.fixture
def gateway(data: Path, settings: Any) -> Iterator[Gateway]:
    (data / "gateway.token").write_text(TOKEN + "\n")
    gateway = Gateway()
    settings.GATEWAY_URL = gateway.url
    yield gateway
    gateway.close()


@pytest.fixture
def decision(run: Run, people: dict[str, User]) -> Decision:
    return rollouts.decide(run, people["approver"], True, "Faster and verified.", run.winner_hash)


@pytest.fixture
def rollout(decision: Decision, people: dict[str, User], gateway: Gateway) -> Rollout:
    """A canary that has just begun."""
    return rollouts.release(decision, people["approver"])
