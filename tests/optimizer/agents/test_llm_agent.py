"""The agent on top of it: proposals from answers, one repair, duplicates, caps, faults, and what is told to people."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.artifacts import baseline_files, source_hash
from optimizer.agents.base import Desk, SearchView, Tried
from optimizer.agents.llm.agent import SETBACKS, LlmAgent, make_llm_agents
from optimizer.agents.llm.settings import LlmSettings
from optimizer.records import Candidate, Post, Proposal
from tests.optimizer.agents.llm_programs import FUSED, KERNEL, WRONG, hunks
from tests.optimizer.agents.llm_server import KEY, Fails, Says, Scripted, Step, answer, llm_server
from tests.optimizer.agents.test_agents import VIEW, measured

SETTINGS = LlmSettings("scripted-1", key=KEY, usd_input=1.0, usd_output=4.0, answer_tokens=4000)
BROKEN = "I would fuse the projections."


class Listening:
    """A desk that takes down what is said and booked."""

    def __init__(self, used: dict[str, Any] | None = None) -> None:
        self.posts: list[tuple[str, str, str]] = []
        self.replies: dict[str, str] = {}  # question -> text
        self.logs: list[str] = []
        self.totals: dict[str, dict[str, Any]] = {}
        self.over = False
        self.desk = Desk(self._post, self._log, self._book, used or {}, lambda: self.over)

    def _post(self, agent: str, kind: str, text: str, reply_to: str = "") -> None:
        self.posts.append((agent, kind, text))
        if reply_to:
            self.replies[reply_to] = text

    def _log(self, text: str, level: str) -> None:
        self.logs.append(text)

    def _book(self, totals: dict[str, Any]) -> None:
        self.totals[totals["agent"]] = totals


@contextmanager
def seated(
    *steps: Step, used: dict[str, Any] | None = None, **changes: Any
) -> Iterator[tuple[LlmAgent, Scripted, Listening]]:
    with llm_server(*steps) as server:
        (agent,) = make_llm_agents(replace(SETTINGS, base_url=server.url, **changes), pause_s=0.01)
        heard = Listening(used)
        agent.sit(heard.desk)
        yield agent, server, heard


def idea(body: dict[str, Any]) -> str:
    """A program that no other prompt of these tests gives."""
    name = f"x{hashlib.sha256(str(body).encode()).hexdigest()[:8]}"
    return answer({"name": name}, edit_forward=hunks(("x = F.embedding", f"x = {name} = F.embedding")))


def says(text: str) -> Says:
    return Says(text)


def after(view: SearchView, proposal: Proposal, ratio: float | None, agents: tuple[LlmAgent, ...] = ()) -> SearchView:
    """The view once the proposal was measured; the agents are told."""
    found = Tried(*measured(proposal, ratio))
    for agent in agents:
        agent.told(found.candidate, found.experiment)
    return replace(
        view,
        experiments=(*view.experiments, found),
        tried=view.tried | {found.candidate.source_hash},
        proposed=view.proposed | {proposal.name},
    )


def test_an_answer_becomes_a_proposal() -> None:
    with seated(says(FUSED)) as (agent, _, heard):
        made = agent.propose(VIEW)
    assert made is not None and made.agent == "llm-1" and made.name == "llm-1: fused qkv"
    assert (made.focus, made.mechanism, made.precision, made.parent) == ("projections", "python", "same", "")
    assert "qkv_proj" in made.files["forward.py"] and "one matrix" in made.hypothesis
    assert 1.0 < made.expected < 1.1, "half of what the model expects is believed until it was measured"
    assert heard.totals["llm-1"]["calls"] == 1 and heard.totals["llm-1"]["usd"] == pytest.approx(0.0018)


def test_a_model_sees_open_questions_answers_them_once_and_asks_its_own() -> None:
    said = answer(
        {
            "name": "talks",
            "question": "Who measured\nint8?",
            "answers": {"q1": "Yes:\x1b it holds it.", "q2": "no", "q9": "?"},
        },
        edit_forward=hunks(("x = F.embedding", "x = y = F.embedding")),
    )
    asked = (Post("q1", "cache", "question", "Has your best a joint cache?"), Post("q2", "cache", "question", "Old?"))
    posts = (*asked, Post("a2", "llm-1", "answer", "Said.", reply_to="q2"))
    with seated(says(said), says(FUSED)) as (agent, server, heard):
        assert agent.propose(replace(VIEW, posts=posts)) is not None
        assert agent.propose(VIEW) is not None
        first, second = server.prompts()
    assert "## Open questions\n- q1 cache: Has your best a joint cache?" in first and "q2 cache" not in first
    assert "Open questions" not in second
    assert heard.replies == {"q1": "Yes: it holds it."}
    assert ("llm-1", "question", "Who measured int8?") in heard.posts and len(heard.posts) == 2


@pytest.mark.parametrize("wrong", [{"answers": ["q1"]}, {"answers": {"q1": 3}}, {"question": 7}])
def test_a_program_is_not_refused_for_what_is_said_beside_it(wrong: dict[str, Any]) -> None:
    said = answer({"name": "talks"} | wrong, edit_forward=hunks(("x = F.embedding", "x = y = F.embedding")))
    with seated(says(said)) as (agent, _, heard):
        assert agent.propose(replace(VIEW, posts=(Post("q1", "cache", "question", "?"),))) is not None
    assert heard.posts == []


def test_a_malformed_answer_is_repaired_once() -> None:
    with seated(says(BROKEN), says(FUSED)) as (agent, server, heard):
        made = agent.propose(VIEW)
        turns = [m["role"] for m in server.asked[1]["messages"]]
        assert turns == ["system", "user", "assistant", "user"] and "0 json blocks" in server.prompts()[1]
    assert made is not None and heard.totals["llm-1"]["failures"] == {"malformed": 1}


def test_an_answer_that_stays_malformed_is_given_up_and_remembered() -> None:
    with seated(says(BROKEN), says(BROKEN), says(FUSED)) as (agent, server, heard):
        assert agent.propose(VIEW) is None and len(server.asked) == 2
        assert agent.propose(VIEW) is not None
        assert "could not be tried" in server.prompts()[2] and len(server.asked[2]["messages"]) == 2
    assert heard.totals["llm-1"]["failures"] == {"malformed": 2} and "gave no program" in heard.logs[0]


def test_a_cut_answer_is_told_to_be_shorter() -> None:
    with seated(Says(FUSED[:300], finish="length"), says(FUSED)) as (agent, server, _):
        assert agent.propose(VIEW) is not None
        assert "cut off" in server.prompts()[1]


def test_nonsense_again_and_again_ends_the_agent_and_not_the_run() -> None:
    with seated(says(BROKEN)) as (agent, server, heard):
        assert [agent.propose(VIEW) for _ in range(SETBACKS + 3)] == [None] * (SETBACKS + 3)
        assert len(server.asked) == 2 * SETBACKS, "an agent that left asks no more"
    ((who, _, text),) = heard.posts
    assert who == "llm-1" and "in a row brought nothing" in text and text.endswith("The run goes on without me.")


def test_refusals_are_not_argued_with() -> None:
    with seated(Says(None, refusal="No."), says(FUSED)) as (agent, server, heard):
        assert agent.propose(VIEW) is None and len(server.asked) == 1
        assert agent.propose(VIEW) is not None
    assert heard.totals["llm-1"]["failures"] == {"refusal": 1}


def test_a_wrong_key_ends_the_agent_with_a_sentence_that_names_the_mend() -> None:
    with seated(Fails(401, f"Incorrect API key: {KEY}")) as (agent, server, heard):
        assert agent.propose(VIEW) is None and agent.propose(VIEW) is None and len(server.asked) == 1
    told = f"{heard.posts} {heard.logs} {heard.totals} {agent.limits(VIEW)}"
    assert "Put a key of that server into POLYMORPH_LLM_API_KEY" in heard.posts[0][2] and KEY not in told


def test_the_cost_cap_is_said_on_the_board_and_ends_the_agent() -> None:
    with seated(lambda body: Says(idea(body), usage=(4000, 1000, 0)), max_usd=0.05) as (agent, server, heard):
        view = VIEW
        while (made := agent.propose(view)) is not None:
            view = after(view, made, 1.0, (agent,))
        asked = len(server.asked)
        assert agent.propose(view) is None and len(server.asked) == asked, "it asks no more"
    assert asked == 4, "8 thousandths of a dollar a call, and two cents set aside for each"
    assert any("The cap of this run is reached" in text and "of $0.05" in text for _, _, text in heard.posts)
    assert heard.totals["llm-1"]["usd"] <= 0.05


def test_a_resumed_run_keeps_its_totals_and_its_cap() -> None:
    with seated(says(FUSED), max_tokens=7000) as (agent, _, heard):
        assert agent.propose(VIEW) is None and "cap" in heard.posts[0][2], "a prompt and an answer are more than that"
    before = {
        "llm-1": {"model": "scripted-1", "calls": 9, "input_tokens": 900_000, "output_tokens": 90_000, "usd": 0.999}
    }
    with seated(says(FUSED), used=before) as (agent, server, heard):
        assert agent.propose(VIEW) is None and not server.asked
    assert "$1.00 of $1.00" in heard.posts[0][2]
    with seated(says(FUSED), used=before, max_usd=5.0, max_tokens=5_000_000) as (agent, _, heard):
        assert agent.propose(VIEW) is not None
    assert heard.totals["llm-1"]["calls"] == 10 and heard.totals["llm-1"]["usd"] > 0.999


def test_the_next_prompt_holds_what_failed() -> None:
    with seated(says(WRONG), says(FUSED)) as (agent, server, _):
        made = agent.propose(VIEW)
        assert made is not None
        agent.propose(after(VIEW, made, None, (agent,)))
        assert "llm-1: rolled logits: failed: it crashed" in server.prompts()[1]


def test_a_duplicate_is_answered_with_what_became_of_the_first() -> None:
    tuned = FUSED.replace("fused qkv", "again").replace("Q, K and V", "All three")
    with seated(says(FUSED), says(tuned), says(KERNEL)) as (agent, server, heard):
        made = agent.propose(VIEW)
        assert made is not None
        second = agent.propose(after(VIEW, made, 1.25, (agent,)))
        assert second is not None and second.mechanism == "cpp"
        assert "same program as llm-1: fused qkv" in server.prompts()[2] and "1.250x" in server.prompts()[2]
    assert heard.totals["llm-1"]["failures"] == {"duplicate": 1}


def test_a_claim_that_the_board_refused_is_told() -> None:
    with seated(says(FUSED), says(KERNEL)) as (agent, server, _):
        assert agent.propose(VIEW) is not None
        agent.propose(VIEW)  # the first never came to be a proposal of the run
        assert re.search(r"llm-1: fused qkv: refused", server.prompts()[1])


def test_two_programs_never_share_a_name() -> None:
    with seated(says(FUSED), says(KERNEL.replace("silu kernel", "fused qkv"))) as (agent, _, _):
        first = agent.propose(VIEW)
        assert first is not None
        second = agent.propose(after(VIEW, first, 1.1, (agent,)))
    assert second is not None and (first.name, second.name) == ("llm-1: fused qkv", "llm-1: fused qkv 2")
    assert first.id != second.id


def test_edits_go_onto_the_best_program_there_is() -> None:
    best = baseline_files("llama")["forward.py"].replace("F.silu(", "F.silu( ")
    found = Candidate(
        "a" * 64,
        source_hash({"forward.py": best}),
        "p",
        "fused_gate_up (block_size=32)",
        "x",
        "cache",
        "python",
        "",
        "",
        "",
    )
    view = replace(VIEW, incumbent=found, incumbent_files={"forward.py": best})
    with seated(says(FUSED)) as (agent, server, _):
        made = agent.propose(view)
        assert "start from: fused_gate_up" in server.prompts()[0]
    assert made is not None and made.parent == "a" * 64 and "F.silu( " in made.files["forward.py"]
    assert made.settings == {"block_size": 32}


def test_a_best_program_that_is_too_long_gives_way_to_the_baseline() -> None:
    long = {"forward.py": baseline_files("llama")["forward.py"], "big.cpp": "// " + "x" * 300_000}
    found = Candidate("a" * 64, "s", "p", "whole_step", "x", "cache", "cpp", "", "", "")
    with seated(says(FUSED)) as (agent, server, _):
        made = agent.propose(replace(VIEW, incumbent=found, incumbent_files=long))
        assert "too long to show" in server.prompts()[0] and len(server.prompts()[0]) < 60_000
    assert made is not None and made.parent == "" and set(made.files) == {"forward.py"}


def test_a_context_that_is_shorter_than_thought_is_kept_to() -> None:
    refused = Fails(400, "maximum context length is 20000 tokens", "context_length_exceeded")
    with seated(refused, says(FUSED)) as (agent, _, heard):
        assert agent.propose(VIEW) is None and agent.propose(VIEW) is not None
    assert "half as long" in heard.logs[0] and not heard.posts


def test_expectations_are_believed_as_far_as_they_were_kept() -> None:
    text = FUSED.replace('"expected": 1.1', '"expected": 2.0')
    with seated(says(text), says(KERNEL.replace('"expected": 1.02', '"expected": 2.0'))) as (agent, _, _):
        first = agent.propose(VIEW)
        assert first is not None and first.expected == pytest.approx(1.5)
        second = agent.propose(after(VIEW, first, 1.0, (agent,)))
    assert second is not None and second.expected == pytest.approx(1.25)


def test_nothing_is_asked_once_the_search_is_over() -> None:
    with seated(says(FUSED)) as (agent, server, heard):
        heard.over = True
        assert agent.propose(VIEW) is None and not server.asked
    assert not agent.left


def test_several_agents_share_one_purse_and_begin_elsewhere() -> None:
    with llm_server(says(FUSED), says(KERNEL)) as server:
        agents = make_llm_agents(replace(SETTINGS, base_url=server.url, agents=2), pause_s=0.01)
        heard = Listening()
        for agent in agents:
            agent.sit(heard.desk)
        with ThreadPoolExecutor(2) as threads:  # as a search asks agents that think
            made = list(threads.map(lambda agent: agent.propose(VIEW), agents))
        assert {p.agent for p in made if p} == {"llm-1", "llm-2"}
        begun = [re.search(r"Begin with (\w+)", text)[1] for text in server.prompts()]  # type: ignore[index]
    assert set(heard.totals) == {"llm-1", "llm-2"} and begun[0] != begun[1]
    assert agents[0].purse is agents[1].purse and agents[0].purse.spent()[1] == 2400


def test_no_other_focus_than_the_runs() -> None:
    settings = replace(SETTINGS)
    with llm_server(
        says(FUSED), says(answer({"focus": "cache"}, edit_forward=hunks(("x = F.embedding", "y = x = F.embedding"))))
    ) as server:
        (agent,) = make_llm_agents(replace(settings, base_url=server.url), ["cache"], pause_s=0.01)
        made = agent.propose(VIEW)
        assert "must be one of cache" in server.prompts()[1]
    assert made is not None and made.focus == "cache"
