"""The board in memory and over a run's store keep one contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.board import Board
from optimizer.file_store import FileStore
from optimizer.records import Post
from tests.contracts.board_contract import BoardContract, Clock
from tests.contracts.store_contract import CONFIG


class TestBoardInMemory(BoardContract):
    @pytest.fixture
    def open_board(self, clock: Clock) -> Callable[[], Board]:
        posts: list[Post] = []
        return lambda: Board(list(posts), posts.append, clock)


class TestBoardOverFiles(BoardContract):
    @pytest.fixture
    def open_board(self, clock: Clock, tmp_path: Path) -> Callable[[], Board]:
        store = FileStore(tmp_path)
        store.create("run", CONFIG)
        lease = store.claim("run", "w", 600)
        assert lease
        return lambda: Board(store.load("run").posts, lambda post: store.put_post(lease, post), clock)
