"""Proposals waiting: every agent has its share, nothing is tried twice, new ground is broken first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optimizer.agents.base import SearchView
from optimizer.board import Board
from optimizer.builder import mechanism_hash
from optimizer.queue import PER_AGENT, SELDOM, ProposalQueue
from optimizer.records import Candidate, Estimate, Experiment, Proposal, State


class Agent:
    """Proposes without looking at what was proposed before."""

    def __init__(self, name: str, proposals: Sequence[Proposal]) -> None:
        self.name, self.focus = name, name
        self.left = list(proposals)
        self.asked = 0

    def propose(self, view: SearchView) -> Proposal | None:
        self.asked += 1
        return self.left.pop(0) if self.left else None

    def told(self, candidate: Candidate, experiment: Experiment) -> None: ...

    def limits(self, view: SearchView) -> list[str]:
        return []


def proposal(name: str, agent: str = "ada", focus: str = "attention", mechanism: str = "python") -> Proposal:
    return Proposal(name, agent, focus, name, "why", mechanism, {"forward.py": f"def {name}(): ..."})


def queue(*agents: Agent) -> tuple[ProposalQueue, list[Proposal]]:
    recorded: list[Proposal] = []
    return ProposalQueue(agents, Board(), recorded.append), recorded


def worth(values: dict[str, float]):  # type: ignore[no-untyped-def]
    return lambda p: Estimate("", 1.0, 1.0, values.get(p.name, 1.0), "roofline")


def names(waiting: ProposalQueue) -> list[str]:
    return [w.proposal.name for w in waiting.waiting]


def test_every_agent_has_its_share_waiting_and_no_more() -> None:
    ada = Agent("ada", [proposal(f"a{i}") for i in range(5)])
    bob = Agent("bob", [proposal("b0", "bob")])
    waiting, recorded = queue(ada, bob)
    waiting.fill(SearchView)
    assert sorted(names(waiting)) == ["a0", "a1", "b0"]
    assert [p.name for p in recorded] == names(waiting), "each is recorded once it is claimed"
    waiting.fill(SearchView)
    assert len(waiting.waiting) == PER_AGENT + 1 and ada.asked == PER_AGENT


def test_a_program_is_taken_once_whoever_proposes_it() -> None:
    waiting, recorded = queue()
    assert waiting.add(proposal("a0"))
    assert not waiting.add(proposal("a0", "bob"))
    assert waiting.duplicates == 1 and len(recorded) == 1


def test_an_agent_that_repeats_itself_is_passed_over_this_round() -> None:
    ada = Agent("ada", [proposal("a0")] * 50)
    bob = Agent("bob", [proposal("b0", "bob")])
    waiting, _ = queue(ada, bob)
    waiting.fill(SearchView)
    assert sorted(names(waiting)) == ["a0", "b0"] and ada.asked < 10


def test_a_new_agent_begins_each_round() -> None:
    ada, bob = Agent("ada", []), Agent("bob", [])
    waiting, _ = queue(ada, bob)
    assert [[a.name for a in waiting._in_turn()] for _ in range(3)] == [["ada", "bob"], ["bob", "ada"], ["ada", "bob"]]


def test_new_ground_goes_before_promise() -> None:
    waiting, _ = queue()
    known, new_focus = proposal("known"), proposal("fresh", focus="cache")
    new_mechanism = proposal("kernel", mechanism="cpp")
    for p in (known, new_focus, new_mechanism):
        waiting.add(p)
    predict = worth({"known": 3.0, "fresh": 1.1, "kernel": 1.2})
    measured = [proposal("old")]
    taken = [waiting.take(predict, measured, set()) for _ in range(3)]
    assert [w.proposal.name for w in taken if w] == ["kernel", "fresh", "known"]
    assert waiting.take(predict, measured, set()) is None


def test_tuning_takes_turns_with_what_was_not_measured() -> None:
    promise = {"tuned0": 4.0, "tuned1": 3.9, "tuned2": 3.8, "new0": 1.2, "new1": 1.1}
    proposals = {name: proposal(name) for name in promise}
    sources = {mechanism_hash(p) for name, p in proposals.items() if name.startswith("tuned")}
    waiting, _ = queue()
    for p in proposals.values():
        waiting.add(p)
    taken = [waiting.take(worth(promise), [proposal("old")], sources) for _ in promise]
    assert [w.proposal.name for w in taken if w] == ["tuned0", "new0", "tuned1", "new1", "tuned2"]


def test_what_an_earlier_attempt_claimed_is_waiting_again() -> None:
    waiting, recorded = queue(Agent("ada", [proposal("later")]))
    waiting.restore([proposal("claimed")])
    assert names(waiting) == ["claimed"] and recorded == [], "it is recorded already"
    waiting.fill(SearchView)
    assert names(waiting) == ["claimed", "later"], "it counts to its agent's share"


def test_who_is_asked_answers_at_once_and_an_agent_that_had_nothing_to_say_is_asked_again() -> None:
    board, said = Board(), []

    class Speaker(Agent):
        def talk(self, view: SearchView) -> None:
            said.append(self.name)
            questions = board.read("question")
            if self.name == "asks" and not questions:
                board.post("asks", "question", "Well?")
            if self.name == "answers" and questions and not board.read("answer"):
                board.post("answers", "answer", "Yes.", reply_to=questions[0].id)

    agents = [Speaker("answers", []), Speaker("asks", []), Agent("listens", [])]
    queue = ProposalQueue(agents, board, lambda proposal: None)
    for talks in (False, True):
        queue.fill(SearchView)
        queue.fill(SearchView)
        assert [a.asked for a in agents] == [1 + talks] * 3, "silent until something is said"
        queue.talk(SearchView)
    assert said == ["answers", "asks"] * 3, "twice where something was said, once where nothing was"
    assert [p.kind for p in board.read()] == ["question", "answer"]


def told(waiting: ProposalQueue, proposal: Proposal, leads: float = 0.0) -> None:
    source = mechanism_hash(proposal)
    candidate = Candidate("h", source, proposal.id, proposal.name, proposal.agent, proposal.focus, "python", "", "", "")
    waiting.told(
        candidate, Experiment("h-2", "h", 2, State.KEEP, "base", True, leads or 1.0, 1.0, 9.0, leads=bool(leads))
    )


def tuned(name: str, agent: str, value: int) -> Proposal:
    return replace(proposal(name, agent), files={"forward.py": f"def step(): return {value}\n"})


def test_a_known_mechanism_is_tuned_by_several_agents_at_once() -> None:
    waiting, _ = queue()
    assert waiting.add(tuned("one", "ada", 1)) and not waiting.add(tuned("two", "bob", 2))
    told(waiting, tuned("one", "ada", 1))
    assert waiting.add(tuned("three", "ada", 3)) and waiting.add(tuned("four", "bob", 4))
    assert not waiting.add(tuned("five", "bob", 4)), "the very same program is refused"


def test_a_new_source_that_cannot_beat_the_incumbent_comes_seldom() -> None:
    known = tuned("known", "ada", 0)

    def taken(lead: float) -> list[str]:
        waiting, _ = queue()
        told(waiting, known, lead)
        for i in range(1, 9):
            waiting.add(tuned(f"tuned{i}", "ada", i))
        waiting.add(proposal("new", "bob"))
        foreseen = worth({"new": 1.5} | {f"tuned{i}": 3.0 for i in range(1, 9)})
        order = [waiting.take(foreseen, [known], {mechanism_hash(known)}) for _ in range(9)]
        return [w.proposal.name for w in order if w]

    assert taken(lead=1.2).index("new") == 1
    assert taken(lead=3.0).index("new") == SELDOM
