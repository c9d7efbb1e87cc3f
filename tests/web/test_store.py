"""The runs' rows keep the contracts of a store and of a board, and what only a database can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from channels.layers import get_channel_layer
from django.db import connections

from optimizer.board import Board
from polymorph_web.accounts.models import Organisation, User
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import Run, RunEvent
from polymorph_web.runs.store import DjangoRunStore, group_name
from tests.contracts.board_contract import BoardContract, Clock
from tests.contracts.store_contract import CONFIG, StoreContract


class DjangoHarness:
    """A store closes the connection of the thread that it claims in, as a worker's end would."""

    def __init__(self, endpoint: Endpoint, user: User) -> None:
        self.endpoint, self.user = endpoint, user

    def create(self, config: dict[str, Any]) -> str:
        return str(Run.objects.create(endpoint=self.endpoint, created_by=self.user, config=config).id)

    def store(self) -> DjangoRunStore:
        return ClosingStore()

    def cancel(self, run_id: str) -> None:
        Run.objects.filter(id=run_id).update(cancel_requested=True)


class ClosingStore(DjangoRunStore):
    def claim(self, run_id: str, owner: str, ttl_s: float) -> Any:
        try:
            return super().claim(run_id, owner, ttl_s)
        finally:
            connections.close_all()


@pytest.fixture
def harness(transactional_db: None) -> DjangoHarness:
    user = User.objects.create_user("ada")
    organisation = Organisation.objects.create(name="Acme", slug="acme")
    return DjangoHarness(Endpoint.objects.create(organisation=organisation, slug="chat", created_by=user), user)


class TestDjangoStore(StoreContract):
    pass


class TestBoardOverRows(BoardContract):
    @pytest.fixture
    def open_board(self, clock: Clock, harness: DjangoHarness) -> Callable[[], Board]:
        store, run_id = harness.store(), harness.create(CONFIG)
        lease = store.claim(run_id, "w", 600)
        assert lease
        return lambda: Board(store.load(run_id).posts, lambda post: store.put_post(lease, post), clock)


def test_an_event_that_fails_leaves_no_gap(harness: DjangoHarness) -> None:
    store, run_id = harness.store(), harness.create(CONFIG)
    lease = store.claim(run_id, "w", 600)
    assert lease
    with pytest.raises(TypeError):
        store.append_event(lease, "log", {"text": object})
    assert store.append_event(lease, "log", {"text": "whole"}) == 1
    assert Run.objects.get(id=run_id).last_seq == RunEvent.objects.get(run_id=run_id).seq == 1


def test_an_ended_run_says_when_and_why(harness: DjangoHarness) -> None:
    store, run_id = harness.store(), harness.create(CONFIG)
    lease = store.claim(run_id, "w", 600)
    assert lease
    assert Run.objects.get(id=run_id).started is not None
    store.finish(lease, "no_gain", "Nothing was faster.")
    run = Run.objects.get(id=run_id)
    assert (run.state, run.reason, run.phase, run.lease_owner) == ("no_gain", "Nothing was faster.", "done", "")
    assert run.finished is not None and not run.is_live


@pytest.fixture
def rung(settings: Any) -> Iterator[str]:
    if not settings.CHANNEL_REDIS_URL:
        pytest.skip("only a shared channel layer can be rung from another process")
    yield settings.CHANNEL_REDIS_URL


def test_writers_elsewhere_wake_the_pages(rung: str, harness: DjangoHarness) -> None:
    """The worker's ring arrives at a socket's process through Redis."""
    from asgiref.sync import async_to_sync, sync_to_async

    store, run_id = harness.store(), harness.create(CONFIG)
    lease = store.claim(run_id, "w", 600)
    assert lease

    async def heard() -> dict[str, Any]:
        layer = get_channel_layer()
        assert layer is not None
        name = await layer.new_channel()
        await layer.group_add(group_name(run_id), name)
        await sync_to_async(store.append_event)(lease, "log", {"text": "x"})
        return dict(await layer.receive(name))

    assert async_to_sync(heard)() == {"type": "run.wake"}
