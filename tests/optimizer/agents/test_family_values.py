"""Every part that serves a family computes its model: decode, prefill, chunks, mixed steps, poisoned slots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract import LoadedModel
from engine.models.structure import baseline_of
from engine.models.weights import load_model, with_layers
from kernels.build import has_compiler
from kernels.precision import exact
from optimizer.agents import Machine, SearchView
from optimizer.agents.focused import FocusAgent
from optimizer.agents.programs.edit import parts
from optimizer.agents.programs.program import Program
from optimizer.export.finish import cleaned
from tests.contracts.family_contract import write_family
from tests.optimizer.agents.support import build, build_files, play

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 13}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 13}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 4, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 12, "q_lora_rank": 20,
            "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 1,
        },
    ),
}  # fmt: skip
TOGETHER = {
    "qwen3": "split_linear + fused_heads + fused_gate_up + joint_kv + rms_norm + last_rows",
    "mistral": "packed_linear + fused_qkv + joint_kv + rolled_rope + last_rows",
    "mixtral": "grouped_experts + packed_linear + fused_qkv + index_select + rms_norm",
    "qwen3_moe": "grouped_experts + split_linear + paged_attention + fused_heads (PM_SPLIT=1)",
    "deepseek_v3": "grouped_experts + packed_linear + rms_norm (PM_SPLIT=2)",
}
QUANTISED_KL = 0.03  # of models this narrow


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """The family's tiny model in both dtypes."""
    path = tmp_path_factory.mktemp(request.param)
    write_family(path, *FAMILIES[request.param])
    return {dtype: load_model(path, dtype) for dtype in ("float32", "bfloat16")}


def programs(model: LoadedModel, dtype: str) -> list[Program]:
    """A program for each part that agents may try on this model, and one of many parts together."""
    config = asdict(model.config)
    view = SearchView(config=config, dtype=dtype, machine=Machine(2, has_compiler=has_compiler()))
    single = [Program.of([name]) for name in parts()]
    together = Program.parse(TOGETHER[model.config.model_type])
    runnable = [p for p in (*single, together) if not any(FocusAgent._obstacle(part, view) for part in p.chosen)]
    assert together in runnable or dtype == "float32" or not has_compiler()
    assert len(runnable) >= {"grouped": 8, "latent": 3}[baseline_of(config)]
    return [p for p in runnable if p.mechanism != "compile"]


def typical_kl(reference: Tensor, other: Tensor) -> float:
    """The median row's KL divergence from `reference`. A mean would be of the few rows that one rounding sends to another
    expert, which says nothing of the rest."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).median())


def baseline(model: LoadedModel) -> Tensor:
    return play(build(Program(), model), model.config.vocab_size)


def test_it_computes_the_float32_model(models: dict[str, LoadedModel]) -> None:
    model = models["float32"]
    want = baseline(model)
    for program in programs(model, "float32"):
        got = play(build(program, model), model.config.vocab_size)
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3, msg=lambda m, p=program: f"{p.name}: {m}")


def test_it_is_as_close_to_float32_as_the_baseline_is_in_bfloat16(models: dict[str, LoadedModel]) -> None:
    model, truth = models["bfloat16"], baseline(models["float32"])
    limit = 1.5 * typical_kl(truth, baseline(model)) + 1e-4
    for program in programs(model, "bfloat16"):
        got = typical_kl(truth, play(build(program, model), model.config.vocab_size))
        assert got <= (limit if exact(program.precision) else QUANTISED_KL), (program.name, got, limit)


def test_what_lies_in_free_slots_never_reaches_a_result(models: dict[str, LoadedModel]) -> None:
    model = models["bfloat16"]
    for program in programs(model, "bfloat16"):
        forward, vocab = build(program, model), model.config.vocab_size
        clean, nan = (play(forward, vocab, fill) for fill in (0.0, float("nan")))
        assert torch.equal(clean, nan), program.name


def test_it_runs_with_fewer_layers_and_leaves_the_weights_alone(models: dict[str, LoadedModel]) -> None:
    model = models["bfloat16"]
    short = with_layers(model, 1)
    want, before = baseline(short), {name: tensor.clone() for name, tensor in model.weights.items()}
    for program in programs(model, "bfloat16"):
        play(build(program, model), model.config.vocab_size)
        got = play(build(program, short), model.config.vocab_size)
        assert typical_kl(want, got) < (1e-3 if exact(program.precision) else QUANTISED_KL), program.name
        assert before.keys() == model.weights.keys(), program.name
        assert all(torch.equal(before[name], tensor) for name, tensor in model.weights.items()), program.name


def test_a_cleaned_program_computes_the_same_bits(models: dict[str, LoadedModel]) -> None:
    """As a finalist is: what a family's sources import of each other is kept."""
    model = models["bfloat16"]
    program = programs(model, "bfloat16")[-1]
    files = program.files(baseline_of(asdict(model.config)))
    plain, clean = (build_files(made, model, program.settings) for made in (files, cleaned(files)))
    vocab = model.config.vocab_size
    assert cleaned(files) != files and torch.equal(play(plain, vocab), play(clean, vocab))
