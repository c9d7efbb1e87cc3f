"""What every board promises. A backend's tests subclass `BoardContract` and give `open_board`.

It opens the board over the same posts as before, as a resumed worker would."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optimizer.board import Board
from optimizer.records import Candidate, Experiment, State

OpenBoard = Callable[[], Board]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def candidate(source: str = "s1") -> Candidate:
    return Candidate("a" * 64, source, "p1", "fused gate and up", "p", "projections", "python", "one read", "", "/a")


def kept(ratio: float = 1.3) -> Experiment:
    return Experiment("e1", "a" * 64, 1, State.KEEP, "b" * 64, True, ratio, ratio - 0.05, ratio + 0.05)


def failed() -> Experiment:
    return Experiment("e1", "a" * 64, 1, State.FAILED, "b" * 64, False, failure="It did not compile.")


class BoardContract:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def test_two_agents_cannot_hold_one_mechanism(self, open_board: OpenBoard) -> None:
        board = open_board()
        assert board.claim("ada", "s1", "c1", "fuse gate and up") is not None
        assert board.claim("bob", "s1", "c2", "fuse gate and up, wider") is None
        assert board.claim("bob", "s2", "c3", "pack the weights") is not None

    def test_an_agent_may_vary_its_own_mechanism(self, open_board: OpenBoard) -> None:
        board = open_board()
        assert board.claim("ada", "s1", "c1", "tile 8") is not None
        assert board.claim("ada", "s1", "c2", "tile 16") is not None

    def test_a_claim_expires(self, open_board: OpenBoard, clock: Clock) -> None:
        board = open_board()
        board.claim("ada", "s1", "c1", "tile 8", ttl_s=10)
        clock.now += 11
        assert board.claimed() == set()
        assert board.claim("bob", "s1", "c2", "tile 16") is not None

    def test_the_same_program_is_never_tried_twice(self, open_board: OpenBoard, clock: Clock) -> None:
        board = open_board()
        board.claim("ada", "s1", "c1", "tile 8", ttl_s=10)
        clock.now += 11
        assert board.claim("bob", "s1", "c1", "tile 8") is None
        assert board.claim("ada", "s1", "c1", "tile 8") is None

    def test_a_released_claim_frees_the_mechanism(self, open_board: OpenBoard) -> None:
        board = open_board()
        claim = board.claim("ada", "s1", "c1", "tile 8")
        assert claim is not None
        board.release(claim)
        assert board.claim("bob", "s1", "c2", "tile 16") is not None

    def test_a_result_ends_the_claim_and_can_be_read_by_all(self, open_board: OpenBoard) -> None:
        board = open_board()
        board.claim("ada", "s1", "c1", "tile 8")
        board.result("ada", candidate("s1"), kept())
        assert board.claim("bob", "s1", "c2", "tile 16") is not None
        (post,) = board.read("result")
        assert post.data["ratio"] == 1.3
        assert "1.30x (1.25 to 1.35)" in post.text

    def test_a_failure_is_a_dead_end_that_says_why(self, open_board: OpenBoard) -> None:
        board = open_board()
        board.result("ada", candidate(), failed())
        (post,) = board.read("dead_end")
        assert "It did not compile." in post.text

    def test_questions_are_answered_in_a_thread(self, open_board: OpenBoard) -> None:
        board = open_board()
        question = board.post("ada", "question", "Does a block size of 32 help attention?")
        board.post("bob", "answer", "Yes, by 3%.", reply_to=question.id)
        (answer,) = board.read("answer")
        assert answer.reply_to == question.id

    def test_reading_takes_the_latest_of_the_kinds_asked_for(self, open_board: OpenBoard) -> None:
        board = open_board()
        for n in range(5):
            board.post("ada", "insight", f"insight {n}")
        board.post("ada", "dead_end", "no")
        assert [p.text for p in board.read("insight", limit=2)] == ["insight 3", "insight 4"]
        assert len(board.read()) == 6
        assert board.read(agent="bob") == []

    def test_a_reopened_board_knows_claims_results_and_insights(self, open_board: OpenBoard) -> None:
        first = open_board()
        first.claim("ada", "s1", "c1", "tile 8")
        first.post("ada", "insight", "Attention is 6% of a step.")
        second = open_board()
        assert second.claimed() == {"s1"}
        assert second.claim("bob", "s9", "c1", "tile 8") is None
        assert [p.text for p in second.read("insight")] == ["Attention is 6% of a step."]
