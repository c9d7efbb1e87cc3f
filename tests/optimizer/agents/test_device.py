"""What is proposed where there is an NVIDIA GPU, and that none of it is where there is none. No GPU is needed to propose."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.artifacts import read_artifact
from kernels import registry
from kernels.gpu import tunables
from kernels.hardware import Gpu, Hardware
from optimizer.agents import Agent, Machine, SearchView, limits, make_agents
from optimizer.agents.programs.program import Program, ProgramError
from optimizer.builder import Builder
from optimizer.cost.roofline import Ceilings, weight_share
from optimizer.records import Proposal
from tests.optimizer.agents.test_agents import CONFIG, UNLIKE_LLAMA, VIEW, measured, search
from tests.paths import ROOT

H200 = Hardware("a CPU beside it", 16, (), 128 << 30, gpu=Gpu("NVIDIA H200", (9, 0), 141 << 30, 132))
A100 = Gpu("NVIDIA A100", (8, 0), 80 << 30, 108)
DEVICE_SOURCE = (ROOT / "engine" / "device" / "forward.py").read_text()


def on(gpu: Gpu | None, **changes: object) -> SearchView:
    machine = Machine(H200.cores, H200.features, {"read_gbs": 300.0, "cuda_read_gbs": 4300.0}, True, gpu)
    return replace(VIEW, machine=machine, **changes)


def of_device(view: SearchView, count: int) -> list[Proposal]:
    return [p for p in search(make_agents(0), view, count) if p.device == "cuda"]


def test_a_cuda_device_is_offered_the_device_program_first_and_as_it_is() -> None:
    first = search(make_agents(0), on(H200.gpu), 1)[0]
    assert (first.name, first.mechanism, first.device, first.precision) == ("triton", "triton", "cuda", "same")
    assert first.files == {"forward.py": DEVICE_SOURCE} and first.settings == {}
    assert "NVIDIA H200 (compute capability 9.0) reads" in first.hypothesis and "269 MB" in first.hypothesis


@pytest.mark.parametrize("tolerance", ["exact", "near", "quantised"])
def test_nothing_of_it_is_proposed_on_a_machine_without_a_gpu(tolerance: str) -> None:
    view, agents = on(None, tolerance=tolerance), make_agents(0)
    made = search(agents, view, 25)
    assert not any(p.device == "cuda" or "triton" in p.name or "triton" in p.settings for p in made)
    assert not any("NVIDIA" in sentence for sentence in limits(agents, view)), "nor named as something that is missing"


def test_a_resumed_run_that_lost_its_gpu_proposes_no_more_of_it() -> None:
    agents = make_agents(0)
    tell(agents, of_device(on(H200.gpu), 1)[0], 30.0)
    assert not any(p.device == "cuda" for p in search(agents, on(None), 20))


def test_graphs_pieces_of_contexts_and_every_parameter_of_a_launched_kernel_are_varied() -> None:
    agents, view = make_agents(0, ["projections"]), on(H200.gpu)
    made = of_device_alone(agents, view, 400)
    changed: dict[str, set[int]] = {}
    for proposal in made:
        for operator, values in proposal.settings.get("triton", {}).items():
            assert registry.load(operator, "triton").resolve(values), "each value is declared and allowed"
            for name, value in values.items():
                changed.setdefault(f"{operator}.{name}", set()).add(value)
    assert any(p.settings.get("graphs") == 0 for p in made)
    assert {1, 2, 4, 8, 16, 32, 64} <= changed["paged_decode_attention.SPLITS"]
    launched = set(registry.names("triton")) & set(tunables.in_step("same"))
    assert {key.split(".")[0] for key in changed} == launched
    for operator in launched:
        for parameter in registry.load(operator, "triton").params:
            tried = changed[f"{operator}.{parameter.name}"]
            assert tried and tried <= set(parameter.values) - {parameter.default}
    assert all("instead of" in p.hypothesis for p in made if p.settings.get("triton"))


def test_the_first_variations_are_graphs_and_splits() -> None:
    made = of_device_alone(make_agents(0, ["projections"]), on(H200.gpu), 5)
    assert [p.name for p in made[:3]] == ["triton", "triton (graphs=0)", "triton (paged_decode_attention.SPLITS=1)"]


@pytest.mark.parametrize(
    ("gpu", "tolerance", "kinds"),
    [
        (H200.gpu, "near", {"same"}),
        (H200.gpu, "exact", {"same"}),
        (H200.gpu, "quantised", {"same", "fp8", "int8", "int4"}),
        (A100, "quantised", {"same", "int8", "int4"}),
    ],
)
def test_weights_of_fewer_bits_are_proposed_where_the_run_and_the_capability_allow(
    gpu: Gpu, tolerance: str, kinds: set[str]
) -> None:
    made = of_device_alone(make_agents(0, ["projections"]), on(gpu, tolerance=tolerance), 12)
    assert {p.settings.get("weights", "same") for p in made} == kinds
    assert all(p.precision == p.settings.get("weights", "same") for p in made), "each declares what it computes in"


def test_int4_is_not_proposed_for_a_depth_that_no_group_divides() -> None:
    view = on(H200.gpu, tolerance="quantised", config={**CONFIG, "intermediate_size": 1544})
    made = of_device_alone(make_agents(0, ["projections"]), view, 12)
    assert {p.settings.get("weights", "same") for p in made} == {"same", "fp8", "int8"}


def test_parameters_follow_the_kernels_that_the_weights_bring() -> None:
    """What won with int8 weights is tuned in the int8 product, and never in one that is not launched."""
    agents, view = make_agents(0, ["projections"]), on(H200.gpu, tolerance="quantised")
    made = of_device_alone(agents, view, 200, {"int8": 40.0})
    tuned = [p.settings["triton"] for p in made if p.settings.get("weights") == "int8" and "triton" in p.settings]
    assert any("weight_only_matmul" in values for values in tuned)
    assert not any({"small_m_matmul", "gated_mlp", "fp8_matmul", "moe"} & set(values) for values in tuned)
    with pytest.raises(
        ProgramError, match=r"gated_mlp\.SMALL_WARPS is not a parameter of a step with weights kept as int8"
    ):
        Program.of(["triton"], weights="int8", **{"gated_mlp.SMALL_WARPS": 2}).files()
    with pytest.raises(registry.ParameterError, match="SPLITS cannot be 3"):
        Program.of(["triton"], **{"paged_decode_attention.SPLITS": 3}).files()


def test_schedulers_and_block_sizes_are_tried_on_it_once_it_won() -> None:
    everything = search(make_agents(0), on(H200.gpu), 60, lambda p: 30.0 if p.device == "cuda" else 1.0)
    made = [p for p in everything if p.device == "cuda"]
    assert any("policy" in p.settings for p in made) and any("block_size" in p.settings for p in made)
    for proposal in made:
        parts = set(Program.parse(proposal.name).parts)
        assert parts == {"triton"} and proposal.files == {"forward.py": DEVICE_SOURCE}


def test_a_gpu_too_old_or_another_family_is_told_and_offered_nothing() -> None:
    old = on(Gpu("Tesla T4", (7, 5)))
    assert not of_device(old, 15)
    assert any("compute capability 8.0 and there is Tesla T4" in s for s in limits(make_agents(0), old))
    for family, fields in UNLIKE_LLAMA.items():
        view = on(H200.gpu, config={**CONFIG, "model_type": family, **fields})
        assert not of_device(view, 3)
        assert any(s.startswith("device: triton cannot be tried") for s in limits(make_agents(0), view))


def test_a_name_says_the_whole_program_and_the_folder_is_a_candidate(tmp_path: Path) -> None:
    values = {"paged_decode_attention.SPLITS": 4, "lm_head.SMALL_WARPS": 2}
    program = Program.of(["triton"], weights="fp8", graphs=0, policy="prefill_first", **values)
    assert Program.parse(program.name) == program
    settings = {"graphs": 0, "policy": "prefill_first", "weights": "fp8"}
    settings |= {"triton": {"lm_head": {"SMALL_WARPS": 2}, "paged_decode_attention": {"SPLITS": 4}}}
    assert program.manifest_settings == settings
    proposal = of_device(on(H200.gpu), 1)[0]
    built = Builder(tmp_path).build(replace(proposal, settings=settings, precision="fp8"))
    stored = read_artifact(built.artifact.path, built.artifact.hash).manifest
    assert (stored.device, stored.precision, stored.mechanism, built.kind) == ("cuda", "fp8", "triton", "triton")
    assert stored.settings == settings and set(stored.files) == {"forward.py"}


def test_a_candidate_on_the_gpu_is_held_to_the_gpus_ceilings() -> None:
    """Else it would be thrown out as faster than the machine's memory."""
    found = {"read_gbs": 300.0, "copy_gbs": 200.0, "gemm_bf16_flops": 1e12, "cuda_read_gbs": 4300.0}
    found |= {"cuda_copy_gbs": 4100.0, "cuda_gemm_bf16_flops": 7e14}
    assert Ceilings.of(found, "bfloat16") == Ceilings(4.3e12, 4.1e12, 7e14, True)
    assert weight_share("fp8", "bfloat16") == 0.5


def test_proposing_for_a_gpu_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from tests.optimizer.agents.test_device import H200, of_device, on; "
        "assert of_device(on(H200.gpu, tolerance='quantised'), 20); "
        "assert not {'torch', 'triton'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def tell(agents: list[Agent], proposal: Proposal, ratio: float) -> None:
    for agent in agents:
        agent.told(*measured(proposal, ratio))


def of_device_alone(
    agents: list[Agent], view: SearchView, count: int, speeds: dict[str, float] | None = None
) -> list[Proposal]:
    """Proposals of the device agent until it has no more; its plain program is the fastest but where `speeds` says else."""
    agent = next(a for a in agents if a.name == "device")
    made: list[Proposal] = []
    while len(made) < count and (proposal := agent.propose(view)) is not None:
        made.append(proposal)
        ratio = (speeds or {}).get(proposal.precision, 20.0 if proposal.name == "triton" else 10.0)
        tell([agent], proposal, ratio)
    return made
