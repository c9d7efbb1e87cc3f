"""Agents propose distinct programs with a reason, learn from results, and never repeat themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.artifacts import baseline_files, source_hash
from engine.models.structure import baseline_of
from engine.scheduler import SchedulerConfig
from optimizer.agents import Agent, Machine, SearchView, limits, make_agents
from optimizer.agents.memory import Memory
from optimizer.agents.programs.program import Program, ProgramError
from optimizer.agents.scheduling import KNOBS, SchedulingAgent
from optimizer.records import Candidate, Experiment, Proposal, State

CONFIG = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "attention_bias": False,
}  # fmt: skip
VIEW = SearchView(
    config=CONFIG,
    machine=Machine(2, ("avx512_bf16",), {"read_gbs": {"1": 20.0, "2": 41.0}}, has_compiler=True),
    step_s={"decode": 0.045, "prefill": 0.13},
)
SPEEDS = {"whole_step": 5.0, "packed_linear": 1.5, "small_linear": 2.0, "paged_attention": 1.2, "joint_kv": 1.1}


def speed(proposal: Proposal) -> float:
    """A made-up machine: the product of its parts' speeds, and 2% for a parameter."""
    ratio = 1.02 if " (" in proposal.name else 1.0
    for name in proposal.name.partition(" (")[0].split(" + "):
        ratio *= SPEEDS.get(name, 0.99)
    return ratio


def measured(proposal: Proposal, ratio: float | None, tier: int = 1) -> tuple[Candidate, Experiment]:
    digest = hashlib.sha256(proposal.name.encode()).hexdigest()
    candidate = Candidate(
        digest, source_hash(proposal.files, proposal.settings), proposal.id, proposal.name, proposal.agent,
        proposal.focus, proposal.mechanism, proposal.hypothesis, "", "",
    )  # fmt: skip
    if ratio is None:
        return candidate, Experiment("x", digest, tier, State.FAILED, "base", False, failure="it crashed")
    return candidate, Experiment("x", digest, tier, State.KEEP, "base", True, ratio, ratio * 0.98, ratio * 1.02)


def search(
    agents: list[Agent], view: SearchView, count: int, result: Callable[[Proposal], float | None] = speed
) -> list[Proposal]:
    """Asks the agents in turn and tells all of them what came of each proposal."""
    made: list[Proposal] = []
    for turn in range(10 * count):
        if len(made) == count:
            break
        proposal = agents[turn % len(agents)].propose(view)
        if proposal is not None:
            made.append(proposal)
            for agent in agents:
                agent.told(*measured(proposal, result(proposal)))
    return made


def test_twenty_proposals_are_at_least_ten_sources_of_four_foci_and_two_mechanisms() -> None:
    made = search(make_agents(0), VIEW, 20)
    assert len({source_hash(p.files, p.settings) for p in made}) >= 14
    assert {p.focus for p in made} == {"attention", "projections", "cache", "scheduling"}
    assert {"python", "cpp"} <= {p.mechanism for p in made}
    assert "whole_step" in {p.name for p in made[:5]}  # what promises most comes early


def test_no_program_is_proposed_twice() -> None:
    made = search(make_agents(0), VIEW, 60)
    assert len({p.name for p in made}) == len({(str(p.files), str(p.settings)) for p in made}) == 60
    assert len({p.id for p in made}) == 60


def test_a_hypothesis_names_the_bottleneck_with_a_number() -> None:
    for proposal in search(make_agents(0), VIEW, 25):
        assert "%" in proposal.hypothesis or "GB/s" in proposal.hypothesis
        assert "{" not in proposal.hypothesis and proposal.hypothesis.endswith("x the baseline.")
    whole = next(p for p in search(make_agents(0), VIEW, 5) if p.name == "whole_step")
    assert "269 MB of weights at 6.0 GB/s where this machine reads 41" in whole.hypothesis


def test_the_measured_profile_decides_what_comes_first() -> None:
    heavy = {"projections": 0.1, "head": 0.02, "attention": 0.08, "cache": 0.7, "pointwise": 0.1}
    view = replace(VIEW, profile={"decode": heavy, "prefill": heavy})
    proposal = make_agents(0, ["cache"])[0].propose(view)
    assert proposal is not None and "70%" in proposal.hypothesis


def test_the_same_seed_gives_the_same_search() -> None:
    first, second, other = ([p.name for p in search(make_agents(seed), VIEW, 30)] for seed in (3, 3, 4))
    assert first == second != other


def test_what_won_is_tuned_and_combined() -> None:
    made = search(make_agents(0), VIEW, 30)
    assert any(p.name.startswith("whole_step (PM_") for p in made)
    assert any(p.name.startswith("whole_step (") and "policy=" in p.name for p in made)
    assert any(p.name.startswith("whole_step (") and "block_size=" in p.name for p in made)
    crossed = [Program.parse(p.name) for p in made]
    linears = {"small_linear", "split_linear", "packed_linear"}
    assert any("paged_attention" in p.parts and linears & set(p.parts) for p in crossed)


def test_a_resumed_agent_goes_on_where_it_stopped() -> None:
    whole = search(make_agents(0), VIEW, 24)
    half, resumed = search(make_agents(0), VIEW, 12), make_agents(0)
    for proposal in half:
        for agent in resumed:
            agent.told(*measured(proposal, speed(proposal)))
            agent.told(*measured(proposal, speed(proposal)))  # a result told twice counts once
    rest = search(resumed, VIEW, 12)
    assert not {p.name for p in rest} & {p.name for p in half}
    assert {p.name for p in half} <= {p.name for p in whole}
    assert len({p.name for p in rest} & {p.name for p in whole}) >= 9


def test_programs_of_others_are_not_proposed_again() -> None:
    first = make_agents(0, ["attention"])[0].propose(VIEW)
    assert first is not None
    by_name = replace(VIEW, proposed=frozenset({first.name}))
    by_source = replace(VIEW, tried=frozenset({source_hash(first.files, first.settings)}))
    for view in (by_name, by_source):
        second = make_agents(0, ["attention"])[0].propose(view)
        assert second is not None and second.name != first.name


def test_a_failed_program_is_neither_repeated_nor_built_upon() -> None:
    made = search(make_agents(0), VIEW, 30, lambda p: None if "whole_step" in p.name else speed(p))
    whole = [p.name for p in made if "whole_step" in p.name]
    assert whole == ["whole_step", "whole_step (PM_WEIGHT_BITS=12)"]  # with weights kept otherwise it is another kernel


def test_coded_weights_are_tried_without_a_tolerance_since_they_change_nothing() -> None:
    made = search(make_agents(0), VIEW, 20)
    (coded,) = (p for p in made if p.name == "whole_step (PM_WEIGHT_BITS=12)")
    assert coded.precision == "coded" and "PM_WEIGHT_BITS 12" in coded.files["decode_step.cpp"]


def test_without_a_compiler_only_what_needs_none_is_proposed_and_the_agents_say_so() -> None:
    view = replace(VIEW, machine=Machine(2))
    agents = make_agents(0)
    made = search(agents, view, 30)
    assert {p.mechanism for p in made} <= {"python", "settings"}
    assert not any(name.endswith(".cpp") for p in made for name in p.files)
    assert len({source_hash(p.files, p.settings) for p in made}) >= 10
    said = " ".join(limits(agents, view))
    assert "no C++ compiler (install g++ or set CXX)" in said
    assert all(part in said for part in ("whole_step", "paged_attention", "small_linear", "compiled_pointwise"))
    assert not limits(agents, VIEW)


def test_kernels_for_bfloat16_are_off_for_a_float32_endpoint() -> None:
    view = replace(VIEW, dtype="float32")
    agents = make_agents(0)
    assert not any(name.endswith(".cpp") for p in search(agents, view, 20) for name in p.files)
    assert "served in float32" in " ".join(limits(agents, view))


def test_a_bias_of_the_output_gets_no_whole_step_and_those_of_queries_and_keys_do() -> None:
    view, agents = replace(VIEW, config={**CONFIG, "output_bias": True}), make_agents(0)
    assert not any("whole_step" in p.name for p in search(agents, view, 20))
    assert any("output_bias" in sentence for sentence in limits(agents, view))
    view = replace(VIEW, config={**CONFIG, "attention_bias": True, "rope_scaling": {"kind": "yarn"}})
    assert any("whole_step" in p.name for p in search(make_agents(0), view, 5))


def test_a_lower_precision_is_proposed_only_where_it_was_declared_and_says_so() -> None:
    assert {p.precision for p in search(make_agents(0), VIEW, 20)} == {"same", "coded"}
    declared = search(make_agents(0), replace(VIEW, tolerance="quantised"), 30)
    named = {p.name: p.precision for p in declared}
    assert named["whole_step (PM_WEIGHT_BITS=8)"] == "int8" and named["whole_step (PM_WEIGHT_BITS=4)"] == "int4"
    for name, precision in named.items():
        default = "8" if "quantised_linear" in name else "16"
        bits = name.partition("PM_WEIGHT_BITS=")[2].rstrip(")").split(",")[0] or default
        parts = [{"16": "", "12": "coded", "8": "int8", "4": "int4"}[bits], "kv-int8" if "PM_KV_BITS=8" in name else ""]
        assert precision == ("+".join(filter(None, parts)) or "same"), name
    assert named["paged_attention (PM_KV_BITS=8)"] == "kv-int8"
    assert "int8+kv-int8" in {
        p.precision for p in declared if p.focus == "cache"
    }  # a cache in fewer bits for what is best


UNLIKE_LLAMA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_norm": True},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"experts": {"count": 8, "per_token": 2, "intermediate_size": 1024}},
    "deepseek_v3": {
        "experts": {"count": 256, "per_token": 8, "intermediate_size": 512},
        "latent": {"kv_rank": 512},
    },
}


@pytest.mark.parametrize(("family", "fields"), UNLIKE_LLAMA.items())
def test_a_family_with_a_baseline_of_its_own_gets_the_parts_that_edit_it(family: str, fields: dict[str, Any]) -> None:
    config = {**CONFIG, "model_type": family, **fields}
    own, agents, view = baseline_of(config), make_agents(0), replace(VIEW, config=config)
    made = search(agents, view, 20)
    programs = [Program.parse(p.name) for p in made]
    assert any(p.parts for p in programs) and any(p.kernels for p in programs)
    assert all(own in part.baselines for p in programs for part in p.chosen)
    assert all(p.files.keys() >= baseline_files(own).keys() for p in made)
    assert any("moe" in p.kernels for p in programs) == ("experts" in fields)
    said = limits(agents, view)
    assert any(
        "whole_step" in sentence and f"the baseline of a {family} model ({own})" in sentence for sentence in said
    )


def test_what_a_model_has_nothing_of_is_neither_proposed_nor_called_a_limit() -> None:
    agents = make_agents(0)
    assert not any("experts" in p.name for p in search(agents, VIEW, 40))
    assert not any("experts" in sentence for sentence in limits(agents, VIEW))


def test_parts_are_not_put_into_a_baseline_that_they_do_not_edit() -> None:
    with pytest.raises(ProgramError, match="whole_step edits llama, not the grouped baseline"):
        Program.of(["whole_step"]).files("grouped")


def test_foci_choose_the_agents() -> None:
    assert {a.name for a in make_agents(0, ["cache", "scheduling"])} == {"cache", "scheduling"}
    foci = {a.focus for a in make_agents(0) if a.name != "evolution"}
    assert foci == {"attention", "projections", "cache", "scheduling"}


def test_an_agent_runs_dry_rather_than_repeat_itself() -> None:
    agent = make_agents(0, ["cache"])[0]
    view = replace(VIEW, machine=Machine(2))
    made = search([agent], view, 200)
    assert 5 < len(made) < 200
    assert agent.propose(view) is None


def test_memory_keeps_the_higher_tier_and_expects_from_what_was_measured() -> None:
    memory, program = Memory(), Program.of(["packed_linear"])
    proposal = Proposal("p", "projections", "projections", program.name, "", "python", program.files())
    memory.learn(*measured(proposal, 1.9, tier=2))
    memory.learn(*measured(proposal, 1.2, tier=1))
    assert memory.speed(program) == 1.9
    assert memory.expect(program.plus("joint_kv"), VIEW) == pytest.approx(1.9, rel=0.4)
    assert memory.expect(program.plus("joint_kv"), VIEW) > 1.9
    assert memory.best() == program and memory.best(kernels=True) == Program()


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_scheduling_knob_is_one_of_the_scheduler_and_has_a_reason(knobs: dict[str, object]) -> None:
    assert SchedulerConfig.from_settings(knobs) == SchedulerConfig(**knobs) != SchedulerConfig()  # type: ignore[arg-type]
    program = Program.of(["last_rows"], **knobs)
    reasons = [SchedulingAgent().reason(name, value, program) for name, value in knobs.items()]
    assert all(": " in reason for reason in reasons)
    assert Program.parse(program.name) == program


def test_what_a_setting_brought_is_not_credited_to_the_parts_beside_it() -> None:
    plain, drafting = Program.of(["packed_linear"]), Program.of(["packed_linear"], draft_tokens=4)
    view, part = VIEW, "packed_linear"
    memory = Memory({plain: 1.2})
    before = memory.surprise(part, view)
    memory.speeds[drafting] = 2.4
    assert memory.surprise(part, view) == before
    assert memory.setting("draft_tokens", 4) == pytest.approx(2**0.5) and memory.setting("draft_tokens", 2) == 1
    assert memory.expect(plain, view) == 1.2 and memory.expect(drafting, view) == 2.4
    del memory.speeds[plain]
    assert memory.surprise(part, view) == 1 and memory.expect(plain, view) < 2, (
        "no program of other settings is its base"
    )
