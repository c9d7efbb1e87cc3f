"""Who is next: the focus with the most room, unless its proposals fail; and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from optimizer.agents.base import SearchView
from optimizer.bandit import Bandit
from optimizer.board import Board
from optimizer.queue import PATIENCE, ProposalQueue
from optimizer.records import Candidate, Estimate, Experiment, Proposal, State

FOCI = ("attention", "cache", "projections", "scheduling")
ROOM = {"attention": 0.05, "cache": 0.02, "projections": 0.6, "scheduling": 0.04}
ALIKE = dict.fromkeys(FOCI, 2.0)  # what waits promises the same everywhere


def told(bandit: Bandit, focus: str, pays: bool, times: int = 1) -> None:
    for _ in range(times):
        digest = f"{len(bandit._outcomes)}"
        candidate = Candidate(digest, "", "", digest, "ada", focus, "cpp", "", "", "")
        state = State.KEEP if pays else State.DISCARD
        bandit.told(candidate, Experiment(digest, digest, 1, state, "base", True, 1.0, 0.9, 1.1))


def turns(bandit: Bandit, count: int = 100, pays: frozenset[str] = frozenset()) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        focus = bandit.choose(ALIKE)
        found[focus] += 1
        told(bandit, focus, focus in pays)
    return found


@pytest.mark.parametrize("roomy", FOCI)
def test_the_focus_with_the_most_room_has_the_first_turn(roomy: str) -> None:
    first = Counter(Bandit(seed, dict.fromkeys(FOCI, 0.02) | {roomy: 0.6}).choose(ALIKE) for seed in range(50))
    assert first.most_common(1)[0][0] == roomy and first[roomy] >= 40
    nowhere = Counter(Bandit(seed, dict.fromkeys(FOCI, 0.02)).choose(ALIKE) for seed in range(50))
    assert nowhere[roomy] < 30, "the same choice without that room"


def test_it_keeps_the_turns_as_long_as_it_pays() -> None:
    paying = turns(Bandit(1, ROOM), pays=frozenset({"projections"}))
    assert paying["projections"] > 85
    failing = turns(Bandit(1, ROOM))
    assert failing["projections"] < paying["projections"] - 15 and all(failing[f] for f in FOCI)


def test_a_focus_that_stops_paying_loses_turns_and_is_tried_again_later() -> None:
    bandit = Bandit(3, dict.fromkeys(FOCI, 0.2))
    told(bandit, "projections", True, 8)
    before = bandit.chances("projections")
    bandit.choose(ALIKE)
    first = bandit.odds["projections"]
    told(bandit, "projections", False, 8)
    bandit.choose(ALIKE)
    after = bandit.odds["projections"]
    assert first > 0.4 and after < 0.2
    told(bandit, "cache", False, 60)
    good, bad = bandit.chances("projections")
    assert good / (good + bad) == pytest.approx(0.5, abs=0.02), "its failures are forgotten"
    assert before[0] > 5


def test_what_waits_brings_no_more_than_its_focus_has_room_for_nor_than_it_promises() -> None:
    bandit = Bandit(0, {"cache": 0.01, "projections": 0.5}, ratio=4.0)
    assert bandit.most("cache", 12.0) < bandit.most("projections", 5.0) < bandit.most("projections", 6.0)
    assert bandit.most("projections", 6.0) == bandit.most("projections", 60.0), "the room is the ceiling"
    assert bandit.most("projections", 3.0) == bandit.most("cache", 3.0) > 0, "slower than the best so far"


def test_the_same_seed_and_results_give_the_same_turns() -> None:
    first, again, other = (turns(Bandit(seed, ROOM), 40) for seed in (5, 5, 6))
    assert first == again != other


def test_a_resumed_bandit_goes_on_alike() -> None:
    whole, half, resumed = (Bandit(5, ROOM) for _ in range(3))
    turns(half, 15)
    turns(whole, 15)
    for digest, (focus, pays) in half._outcomes.items():
        candidate = Candidate(digest, "", "", digest, "ada", focus, "cpp", "", "", "")
        state = State.KEEP if pays else State.DISCARD
        for visit in (1, 2):  # a result told twice counts once
            resumed.told(candidate, Experiment(digest, digest, 1, state, "base", True, 1.0, 0.9, 1.1, visit=visit))
    assert turns(resumed, 20) == turns(whole, 20) and resumed.rows() == whole.rows()


def test_rows_say_the_bound_the_chance_and_why() -> None:
    bandit = Bandit(0, ROOM)
    told(bandit, "projections", True, 1)
    told(bandit, "projections", False, 2)
    bandit.choose({"projections": 2.0, "cache": 2.0})
    rows = {row["focus"]: row for row in bandit.rows()}
    assert list(rows) == ["projections", "attention", "scheduling", "cache"], "most room first"
    assert rows["projections"]["worth"] == 0.6 and "1 of its last 3 paid off" in rows["projections"]["why"]
    assert rows["projections"]["turn"] + rows["cache"]["turn"] == pytest.approx(1, abs=0.01)
    assert rows["attention"]["turn"] == 0 and "nothing waiting" in rows["attention"]["why"]


# in the queue


class Endless:
    """Always has another proposal."""

    def __init__(self, name: str, focus: str) -> None:
        self.name, self.focus, self.made = name, focus, 0

    def propose(self, view: SearchView) -> Proposal:
        self.made += 1
        name = f"{self.name}{self.made}"
        return Proposal(name, self.name, self.focus, name, "", "python", {"forward.py": f"def {name}(): ..."})

    def told(self, candidate: Candidate, experiment: Experiment) -> None: ...

    def limits(self, view: SearchView) -> list[str]:
        return []


def taken(room: dict[str, float], count: int = 40, ready: frozenset[str] = frozenset(FOCI)) -> list[str]:
    """Agents in the order of their turns, when only projections pay."""
    agents = [Endless(focus, focus) for focus in FOCI] + [Endless("fusion", "projections")]
    bandit, found = Bandit(2, room), []
    queue = ProposalQueue(agents, Board(), lambda p: None, bandit)
    measured = [Proposal(f, f, f, f, "", "python", {}) for f in FOCI]
    for _ in range(count):
        queue.fill(SearchView)
        waiting = queue.take(
            lambda p: Estimate("", 2.0, 2.0, 2.0, "roofline"), measured, set(), lambda p: p.focus in ready
        )
        assert waiting
        found.append(waiting.proposal.agent)
        told(bandit, waiting.proposal.focus, waiting.proposal.focus == "projections")
    return found


def test_the_queue_gives_the_turn_to_the_focus_with_the_most_room() -> None:
    roomy = Counter(taken({"projections": 0.6, "attention": 0.01, "cache": 0.01, "scheduling": 0.01}))
    assert roomy["projections"] + roomy["fusion"] > 25
    without = Counter(taken(dict.fromkeys(FOCI, 0.0)))
    assert without["projections"] + without["fusion"] < roomy["projections"] + roomy["fusion"]


def test_no_agent_is_starved() -> None:
    order = taken({"projections": 9.0, "attention": 0.0, "cache": 0.0, "scheduling": 0.0}, 100)
    for agent in (*FOCI, "fusion"):
        turns_of = [-1, *(i for i, name in enumerate(order) if name == agent)]
        gaps = [b - a for a, b in pairwise(turns_of)]
        assert gaps and max(gaps) <= PATIENCE * 5 + 5, f"{agent}: {gaps}"


def test_what_needs_a_compiler_waits_for_it_and_is_wanted_first_when_it_is_overdue() -> None:
    agents = [Endless("attention", "attention"), Endless("cache", "cache")]
    queue = ProposalQueue(agents, Board(), lambda p: None, Bandit(0, {"attention": 0.5, "cache": 0.0}))
    measured = [Proposal(f, f, f, f, "", "python", {}) for f in FOCI]
    high = {"attention": 3.0, "cache": 1.1}

    def predict(p: Proposal) -> Estimate:
        return Estimate("", 1.0, 1.0, high[p.focus], "roofline")

    for _ in range(PATIENCE * len(agents)):
        queue.fill(SearchView)
        assert queue.wanted(predict)[0].agent == "attention"
        waiting = queue.take(predict, measured, set(), lambda p: p.focus != "cache")
        assert waiting and waiting.proposal.agent == "attention", "the engine does not wait for a compiler"
    queue.fill(SearchView)
    assert queue.wanted(predict)[0].agent == "cache"
    waiting = queue.take(predict, measured, set())
    assert waiting and waiting.proposal.agent == "cache"
