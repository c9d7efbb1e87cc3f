"""Evolution: children satisfy every constraint, a cross really mixes, and cells lead out of what greedy tuning is stuck in."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine.artifacts import source_hash
from kernels import registry
from kernels.precision import exact
from optimizer.agents.base import Agent, SearchView
from optimizer.agents.cells import traits
from optimizer.agents.evolution import EvolutionAgent, concern, crossed, mutated, settled
from optimizer.agents.fusion import FusionAgent
from optimizer.agents.programs.program import Program
from optimizer.agents.scheduling import KNOBS
from optimizer.cost.room import MOST_DRAFTS
from optimizer.elites import Archive, Cell
from optimizer.records import Candidate, Experiment, Proposal, State
from tests.optimizer.agents.test_agents import VIEW

WHOLE = Program.of(["whole_step"])


def results(proposal: Proposal, ratio: float) -> tuple[Candidate, Experiment]:
    digest = hashlib.sha256(proposal.name.encode()).hexdigest()
    candidate = Candidate(
        digest, source_hash(proposal.files, proposal.settings), proposal.id, proposal.name, proposal.agent,
        proposal.focus, proposal.mechanism, proposal.hypothesis, "", "",
    )  # fmt: skip
    state = State.KEEP if ratio > 1 else State.DISCARD
    return candidate, Experiment("x", digest, 1, state, "base", True, ratio, ratio * 0.99, ratio * 1.01)


class Search:
    """Agents on a made-up machine: the first always proposes when it can, and all hear what came of it."""

    def __init__(self, speed: Callable[[Program], float], *agents: Agent) -> None:
        self.speed, self.agents, self.archive = speed, agents, Archive()
        self.seen: dict[str, Proposal] = {}
        self.view = VIEW

    def tell(self, proposal: Proposal) -> None:
        self.seen[proposal.name] = proposal
        result = results(proposal, self.speed(Program.parse(proposal.name)))
        self.archive.told(*result, lambda ratio: Cell(*traits(proposal), "bytes"))
        for agent in self.agents:
            agent.told(*result)
        self.view = replace(self.view, elites=self.archive.elites(), proposed=frozenset(self.seen))

    def start(self, *programs: Program) -> None:
        for program in programs:
            files = program.files()
            self.tell(Proposal(program.name, "start", "projections", program.name, "", "cpp", files, program.settings))

    def run(self, count: int) -> list[Proposal]:
        made = []
        while len(made) < count:
            proposal = next(filter(None, (agent.propose(self.view) for agent in self.agents)), None)
            if proposal is None:
                break
            made.append(proposal)
            self.tell(proposal)
        return made

    @property
    def best(self) -> float:
        return max(self.speed(Program.parse(name)) for name in self.seen)


def flat(program: Program) -> float:
    return 2.0


def test_children_satisfy_every_constraint_and_none_is_made_twice() -> None:
    search = Search(flat, EvolutionAgent(1))
    search.start(WHOLE, Program.of(["small_linear", "paged_attention"], block_size=32), WHOLE.plus(PM_WEIGHT_BITS=12))
    made = search.run(60)
    assert len(made) == 60 and len({p.name for p in made}) == 60
    assert len({repr(sorted(p.files.items())) + repr(p.settings) for p in made}) == 60, "other text each"
    for proposal in made:
        program = Program.parse(proposal.name)
        for op in program.operators:
            op.resolve(program.values_of(op))
        assert settled(program) == program and exact(proposal.precision)
        assert program.parameters.get("PM_SPAN", 256) % program.settings.get("block_size", 1) == 0


def test_a_forbidden_value_is_never_a_child() -> None:
    """The planted fault: without the constraint, such children are made."""
    tall = WHOLE.plus(PM_ROW_TILE=14, PM_PANEL_VECS=2)
    op = registry.load("decode_step")
    assert not op.allows({"PM_ROW_TILE": 14, "PM_PANEL_VECS": 3}) and settled(WHOLE.plus(PM_ROW_TILE=14)) is None
    children = [mutated(tall, random.Random(i)) for i in range(300)]
    assert any(child is None for child in children), "some were refused"
    assert all(op.allows(child.values_of(op)) for child in children if child)


def test_a_cross_mixes_parts_and_values_of_both() -> None:
    one = Program.of(["small_linear", "rms_norm"], PM_UNROLL=4, PM_DEAL=1, policy="prefill_first")
    other = Program.of(["split_linear", "paged_attention", "fused_qkv"], PM_SPAN=128, PM_UNROLL=8, block_size=32)
    children = [child for i in range(200) if (child := crossed(one, other, random.Random(i)))]
    mixed = [c for c in children if set(c.parts) - set(one.parts) and set(c.parts) - set(other.parts)]
    assert len(mixed) > 50 and len(set(children)) > 20
    assert any("rms_norm" in c.parts and "paged_attention" in c.parts for c in mixed)
    values = [dict(c.values) for c in mixed]
    assert any("policy" in v and "PM_SPAN" in v for v in values), "values of both"
    assert {v.get("PM_UNROLL") for v in values} >= {4, 8}
    for child in children:
        assert set(child.parts) <= set(one.parts) | set(other.parts)
        assert dict(child.values).items() <= dict(one.values).items() | dict(other.values).items()


def test_a_cross_of_equal_programs_is_none() -> None:
    assert crossed(WHOLE, WHOLE, random.Random(1)) is None


def test_parents_come_from_all_cells_and_a_child_says_whose_it_is() -> None:
    search = Search(flat, EvolutionAgent(2))
    cells = (WHOLE, WHOLE.plus(PM_PANEL_VECS=1), WHOLE.plus(PM_WEIGHT_BITS=12))
    search.start(*cells)
    made = search.run(30)
    where = {hashlib.sha256(name.encode()).hexdigest(): traits(p) for name, p in search.seen.items()}
    assert {traits(search.seen[p.name]) for p in cells} <= {where[p.parent] for p in made}
    assert any(p.hypothesis.startswith("A cross of") for p in made)
    assert any(p.hypothesis.startswith("A mutation of") for p in made)


def test_nothing_is_proposed_of_what_cannot_run_here_or_was_written_by_another_hand() -> None:
    agent, search = EvolutionAgent(0), Search(flat, EvolutionAgent(0))
    assert agent.propose(VIEW) is None, "no cell was reached"
    search.start(WHOLE)
    no_compiler = replace(search.view, machine=replace(VIEW.machine, has_compiler=False))
    foreign = replace(search.view, elites=tuple(replace(e, name="a clever idea") for e in search.view.elites))
    assert agent.propose(no_compiler) is None and agent.propose(foreign) is None
    assert agent.propose(search.view) is not None and not agent.limits(VIEW)


def test_a_lower_precision_is_no_child_of_a_run_that_did_not_declare_it() -> None:
    for tolerance, lower in (("near", False), ("quantised", True)):
        search = Search(flat, EvolutionAgent(4))
        search.view = replace(VIEW, tolerance=tolerance)
        search.start(WHOLE)
        assert any(not exact(p.precision) for p in search.run(40)) == lower


@pytest.mark.parametrize(
    ("child", "parent", "focus"),
    [
        (WHOLE.plus(PM_UNROLL=4), WHOLE, "projections"),
        (WHOLE.plus(PM_SPAN=128), WHOLE, "attention"),
        (WHOLE.plus(block_size=64), WHOLE, "cache"),
        (WHOLE.plus(draft_tokens=2), WHOLE, "scheduling"),
        (Program.of(["joint_kv", "packed_linear"]), Program.of(["packed_linear"]), "cache"),
    ],
)
def test_a_child_counts_to_the_focus_of_what_it_changes(child: Program, parent: Program, focus: str) -> None:
    assert concern(child, parent) == focus


def test_the_same_seed_and_results_give_the_same_children_after_a_resume() -> None:
    whole = Search(flat, EvolutionAgent(7))
    whole.start(WHOLE, WHOLE.plus(PM_PANEL_VECS=1))
    made = [p.name for p in whole.run(16)]
    half, resumed = Search(flat, EvolutionAgent(7)), Search(flat, EvolutionAgent(7))
    half.start(WHOLE, WHOLE.plus(PM_PANEL_VECS=1))
    half.run(8)
    for proposal in half.seen.values():
        resumed.tell(proposal)
    assert [p.name for p in resumed.run(8)] == made[8:]
    other = Search(flat, EvolutionAgent(8))
    other.start(WHOLE, WHOLE.plus(PM_PANEL_VECS=1))
    assert [p.name for p in other.run(16)] != made


# a landscape with a trap


TRAP = WHOLE.plus(PM_ROW_TILE=9, PM_UNROLL=1)
OTHERWISE = (
    "PM_ROW_TILE", "PM_UNROLL", "PM_PREFETCH", "PM_SPAN", "PM_ATTENTION_ROWS", "PM_KV_PREFETCH", "PM_STRIP", "PM_BARRIER",
)  # fmt: skip


def trap(program: Program) -> float:
    """Wide tiles have an optimum at TRAP, from which every change is a loss. Narrow ones are far slower there, and gain with each
    of OTHERWISE that differs: with six, five of which at once no child changes, they are faster than the trap.
    """
    values, there = (registry.load("decode_step").resolve(p.parameters) for p in (program, TRAP))
    away = {name for name, value in values.items() if value != there[name]}
    return 1.4 + 0.5 * len(away & set(OTHERWISE)) if values["PM_PANEL_VECS"] <= 2 else 4.0 - 0.3 * min(len(away), 8)


class Greedy(FusionAgent):
    """Tunes the best alone."""

    ideas = ()
    turns = ("tune",)

    def combine(self, view: SearchView) -> Iterator[Program]:
        yield from ()

    def tune(self, view: SearchView) -> Iterator[Program]:
        yield from self._neighbours(self.memory.best())


@pytest.mark.parametrize("seed", range(3))
def test_cells_lead_out_of_what_greedy_tuning_of_the_best_is_stuck_in(seed: int) -> None:
    greedy = Search(trap, Greedy(seed))
    greedy.start(TRAP)
    greedy.run(400)
    assert greedy.best == pytest.approx(4.0) and greedy.run(1) == [], "each neighbour was tried, none is better"
    cells = Search(trap, EvolutionAgent(seed))
    cells.start(TRAP)
    cells.run(250)
    assert cells.best > 4.3, "a narrow tile, kept in its own cell while it was slower"


def test_the_cells_are_what_leads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterfactual: the same agent with the best program as its only cell stays in the trap."""
    search = Search(trap, EvolutionAgent(0))
    monkeypatch.setattr("tests.optimizer.agents.test_evolution.traits", lambda proposal: ("one", "", ""))
    search.start(TRAP)
    search.run(250)
    assert search.best == pytest.approx(4.0)


def test_the_bound_of_drafts_is_what_agents_propose_at_most() -> None:
    assert max(knobs.get("draft_tokens", 0) for knobs in KNOBS) == MOST_DRAFTS
