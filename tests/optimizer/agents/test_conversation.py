"""What one agent says on the board changes what another proposes next; without the post it proposes something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from engine.artifacts import source_hash
from optimizer.agents.attention import AttentionAgent
from optimizer.agents.base import Desk, SearchView, Tried
from optimizer.agents.cache import CacheAgent
from optimizer.agents.focused import FocusAgent
from optimizer.agents.fusion import FusionAgent
from optimizer.agents.programs.program import Program
from optimizer.agents.projections import ProjectionsAgent
from optimizer.board import Board
from optimizer.records import Candidate, Experiment, Post, Proposal, State
from tests.optimizer.agents.test_agents import VIEW

Ratio = tuple[float, float, float]
SURE, UNSURE = (1.5, 1.45, 1.55), (1.01, 0.97, 1.05)


@dataclass
class Room:
    """Agents around one board, as a search seats them. `hear` tells all of a result and gives each the floor."""

    agents: Sequence[FocusAgent]
    posts: list[Post] = field(default_factory=list)
    results: list[Tried] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = Board(self.posts)
        for agent in self.agents:
            agent.sit(Desk(self.board.post))

    def view(self, board: bool = True) -> SearchView:
        best: dict[str, Tried] = {}
        for tried in self.results:
            held = best.get(tried.candidate.focus)
            if held is None or (tried.experiment.ratio or 0) >= (held.experiment.ratio or 0):
                best[tried.candidate.focus] = tried
        names = frozenset(t.candidate.name for t in self.results)
        return replace(VIEW, posts=tuple(self.board.read()) if board else (), best=best, proposed=names)

    def hear(self, agent: FocusAgent, name: str, ratio: Ratio | None) -> Candidate:
        """`agent` had this program measured; None: it failed."""
        found = result(agent, name, ratio)
        self.results.append(found)
        for listener in self.agents:
            listener.told(found.candidate, found.experiment)
        self.board.result(agent.name, found.candidate, found.experiment)
        for speaker in self.agents:
            speaker.talk(self.view())
        return found.candidate

    def next_of(self, agent: FocusAgent, board: bool = True) -> Proposal:
        """What a copy of the agent that was told the same results proposes, with the board or without it."""
        copy = type(agent)(agent.seed)
        for tried in self.results:
            copy.told(tried.candidate, tried.experiment)
        proposal = copy.propose(self.view(board))
        assert proposal is not None
        return proposal


def result(agent: FocusAgent, name: str, ratio: Ratio | None) -> Tried:
    program, digest = Program.parse(name), f"{name:0<64}"
    source = source_hash(program.files(), program.settings)
    candidate = Candidate(digest, source, f"p-{name}", name, agent.name, agent.focus, program.mechanism, "", "", "")
    if ratio is None:
        return Tried(candidate, Experiment("e", digest, 1, State.FAILED, "base", False, failure="it crashed"))
    state = State.KEEP if ratio[1] > 1.0 else State.DISCARD
    return Tried(candidate, Experiment("e", digest, 1, state, "base", True, *ratio))


@pytest.fixture
def attention() -> AttentionAgent:
    return AttentionAgent()


@pytest.fixture
def projections() -> ProjectionsAgent:
    return ProjectionsAgent()


def test_a_dead_end_of_one_closes_for_others_what_contains_it(projections: ProjectionsAgent) -> None:
    room = Room([projections, fusion := FusionAgent()])
    room.hear(fusion, "whole_step", (0.5, 0.4, 0.6))
    room.hear(fusion, "split_linear", None)
    heard, deaf = (
        [p for p in proposals(room, projections, board=board) if "split_linear" in p] for board in (True, False)
    )
    assert "fused_gate_up + fused_qkv + split_linear" in deaf and not heard
    assert room.next_of(projections).name != room.next_of(projections, board=False).name


def test_an_insight_of_one_is_where_anothers_program_starts(attention: AttentionAgent) -> None:
    room = Room([attention, fusion := FusionAgent()])
    room.hear(fusion, "whole_step", SURE)
    room.hear(fusion, "whole_step (PM_SPAN=128)", (1.7, 1.65, 1.75))
    (insight,) = room.board.read("insight")
    assert insight.agent == "fusion" and "PM_SPAN = 128 made whole_step 1.13x as fast" in insight.text
    heard, deaf = room.next_of(attention), room.next_of(attention, board=False)
    assert (deaf.name, heard.name) == ("paged_attention", "paged_attention (PM_SPAN=128)")
    assert heard.because == insight.id and insight.text in heard.hypothesis and not deaf.because
    assert "#define PM_SPAN 128" in heard.files["paged_attention.cpp"]


@pytest.mark.parametrize("after", [(1.52, 1.48, 1.56), (1.4, 1.3, 1.5)], ids=["not sure", "slower"])
def test_a_value_that_did_not_surely_win_is_no_insight(attention: AttentionAgent, after: Ratio) -> None:
    room = Room([attention, fusion := FusionAgent()])
    room.hear(fusion, "whole_step", SURE)
    room.hear(fusion, "whole_step (PM_SPAN=128)", after)
    assert room.board.read("insight") == []


def test_a_lower_precision_is_nobodys_start(attention: AttentionAgent) -> None:
    room = Room([attention, fusion := FusionAgent()])
    room.hear(fusion, "whole_step", SURE)
    room.hear(fusion, "whole_step (PM_KV_BITS=8)", (2.0, 1.9, 2.1))
    room.board.post("fusion", "insight", "by hand", data={"parameter": "PM_KV_BITS", "value": 8})
    assert [p.text for p in room.board.read("insight")] == ["by hand"]
    assert room.next_of(attention).name == "paged_attention"


def test_an_answer_puts_the_idea_into_the_program_of_the_one_that_was_asked(
    attention: AttentionAgent, projections: ProjectionsAgent
) -> None:
    room = Room([attention, projections])
    room.hear(projections, "packed_linear", SURE)
    room.hear(attention, "paged_attention", UNSURE)
    (question,), (answer,) = room.board.read("question"), room.board.read("answer")
    assert question.agent == "attention" and question.text.startswith("projections, paged_attention by itself")
    assert (answer.agent, answer.reply_to) == ("projections", question.id)
    assert "My best is packed_linear, 1.50x the baseline" in answer.text and "try it on top" in answer.text
    heard, deaf = room.next_of(attention), room.next_of(attention, board=False)
    assert heard.name == "packed_linear + paged_attention" != deaf.name
    assert heard.because == answer.id and answer.text in heard.hypothesis


def test_the_one_asked_answers_with_its_own_best_values(
    attention: AttentionAgent, projections: ProjectionsAgent
) -> None:
    room = Room([attention, projections])
    room.hear(projections, "split_linear", SURE)
    room.hear(projections, "split_linear (PM_UNROLL=4)", (1.8, 1.7, 1.9))
    room.hear(attention, "rolled_rope", UNSURE)
    room.hear(attention, "expand_prefill + rolled_rope", UNSURE)
    assert room.next_of(attention).name == "expand_prefill + rolled_rope + split_linear (PM_UNROLL=4)"


def test_an_idea_that_has_no_place_in_the_faster_program_is_given_up(projections: ProjectionsAgent) -> None:
    room = Room([cache := CacheAgent(), fusion := FusionAgent(), projections])
    room.hear(projections, "packed_linear", (1.2, 1.15, 1.25))
    room.hear(fusion, "whole_step", (5.0, 4.9, 5.1))
    room.hear(cache, "joint_kv", UNSURE)
    (answer,) = room.board.read("answer")
    assert answer.agent == "fusion" and "does gather, layout, rows in its own way: joint_kv has no place" in answer.text
    assert not answer.data["room"] and not answer.data["contains"]
    heard, deaf = (proposals(room, cache, 12, board) for board in (True, False))
    assert any("joint_kv" in Program.parse(name).parts for name in deaf)
    assert not any("joint_kv" in Program.parse(name).parts for name in heard)


def test_the_one_asked_says_what_the_part_brought_where_it_holds_it(attention: AttentionAgent) -> None:
    room = Room([attention, projections := ProjectionsAgent()])
    room.hear(projections, "packed_linear", SURE)
    room.hear(projections, "packed_linear + rolled_rope + expand_prefill", (1.7, 1.65, 1.75))
    room.hear(attention, "expand_prefill + rolled_rope", UNSURE)
    (answer,) = room.board.read("answer")
    assert answer.data["contains"] and "already; without it 1.50x the baseline" in answer.text


def test_nobody_asks_about_what_was_sure_or_where_nobody_is_faster(attention: AttentionAgent) -> None:
    room = Room([attention, projections := ProjectionsAgent()])
    room.hear(attention, "paged_attention", UNSURE)  # nobody is faster yet
    room.hear(projections, "packed_linear", UNSURE)
    assert room.board.read("question") == []
    room.hear(projections, "small_linear", SURE)
    room.hear(attention, "sequence_decode", (0.8, 0.75, 0.85))
    assert [q.data["program"] for q in room.board.read("question")] == ["paged_attention"]


def test_nobody_asks_about_what_is_to_be_measured_again(
    attention: AttentionAgent, projections: ProjectionsAgent
) -> None:
    room = Room([attention, projections])
    room.hear(projections, "packed_linear", SURE)
    found = result(attention, "paged_attention", UNSURE)
    room.results.append(found)
    for visit in (1, 2):
        attention.told(found.candidate, replace(found.experiment, state=State.RETEST, visit=visit))
        attention.talk(room.view())
        assert len(room.board.read("question")) == visit - 1


def test_a_question_is_asked_once_and_answered_once(attention: AttentionAgent, projections: ProjectionsAgent) -> None:
    room = Room([attention, projections])
    room.hear(projections, "packed_linear", SURE)
    for _ in range(3):
        room.hear(attention, "paged_attention", UNSURE)
    assert len(room.board.read("question")) == len(room.board.read("answer")) == 1


def test_other_text_that_does_the_same_closes_what_contains_it(projections: ProjectionsAgent) -> None:
    room = Room([projections, fusion := FusionAgent()])
    earlier = room.hear(fusion, "packed_linear", SURE)
    same = result(fusion, "fused_qkv + packed_linear", SURE)
    experiment = replace(same.experiment, state=State.DUPLICATE, same_as=earlier.artifact_hash)
    deaf = [p for p in proposals(room, projections) if "fused_qkv + packed_linear" in p]
    post = room.board.repeat("fusion", same.candidate, experiment, earlier, whole=True)
    assert post.kind == "dead_end" and "does the same as packed_linear" in post.text
    heard = [p for p in proposals(room, projections) if {"fused_qkv", "packed_linear"} <= set(p.split(" + "))]
    assert deaf and not heard


def test_what_differs_in_scheduling_alone_closes_nothing(projections: ProjectionsAgent) -> None:
    room = Room([projections])
    earlier, same = (
        result(projections, "packed_linear", SURE),
        result(projections, "packed_linear (policy=decode_first)", SURE),
    )
    experiment = replace(same.experiment, state=State.DUPLICATE, same_as=earlier.candidate.artifact_hash)
    post = room.board.repeat("projections", same.candidate, experiment, earlier.candidate, whole=False)
    projections.heard.read([post])
    assert post.kind == "result" and "the traffic judges" in post.text and not projections.heard.closed


@pytest.mark.parametrize("kind", ["dead_end", "insight", "question", "answer"])
def test_what_a_model_says_without_figures_changes_no_built_in_agent(attention: AttentionAgent, kind: str) -> None:
    room = Room([attention])
    room.board.post(
        "llm-1", kind, "paged_attention (PM_SPAN=128) failed", data={"name": "llm-1: paged", "state": "failed"}
    )
    assert room.next_of(attention).name == room.next_of(attention, board=False).name


def test_agents_of_a_resumed_run_hear_what_was_said_and_answer_what_was_asked() -> None:
    first = Room([attention := AttentionAgent(), projections := ProjectionsAgent()])
    first.agents = [attention]  # projections is not given the floor before the run ends
    first.hear(projections, "packed_linear", SURE)
    projections.told(first.results[0].candidate, first.results[0].experiment)
    first.hear(attention, "paged_attention", UNSURE)
    assert len(first.board.read("question")) == 1 and first.board.read("answer") == []
    again = Room([AttentionAgent(), ProjectionsAgent()], first.board.read(), first.results)
    for agent in again.agents:
        for tried in again.results:
            agent.told(tried.candidate, tried.experiment)
        agent.talk(again.view())
    (answer,) = again.board.read("answer")
    assert answer.reply_to == first.board.read("question")[0].id, "asked once, and answered by the next attempt"
    assert again.next_of(again.agents[0]).because == answer.id


def proposals(room: Room, agent: FocusAgent, count: int = 25, board: bool = True) -> list[str]:
    copy, names = type(agent)(agent.seed), []
    for tried in room.results:
        copy.told(tried.candidate, tried.experiment)
    while len(names) < count and (made := copy.propose(room.view(board))):
        names.append(made.name)
    return names
