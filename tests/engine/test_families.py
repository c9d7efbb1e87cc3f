"""Each model family beside transformers, tiny and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.artifacts import ArtifactStore
from engine.client import HostClient
from engine.loader import load_forward
from engine.models.config import parse_config
from engine.models.errors import ModelError
from engine.models.layout import expected_shapes
from engine.models.rope import inverse_frequencies, rope_table
from optimizer.cost.roofline import step_bytes
from optimizer.measure.probe import OPERATORS, probe_artifact
from optimizer.measure.rig import Rig, Script
from optimizer.verify.faults import LEAKY_TAIL
from tests.contracts.family_contract import (
    NEW,
    OTHER,
    PROMPT,
    TINY,
    FamilyContract,
    Ours,
    their_greedy,
    theirs,
    write_family,
)
from tests.damage import change

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class TestQwen2(FamilyContract):
    family, baseline = "Qwen2", "llama"


class TestQwen3(FamilyContract):
    family, fields = "Qwen3", {"head_dim": 32}


class TestQwen3WithBiases(FamilyContract):
    family, fields = "Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}


class TestMistralWithAWindow(FamilyContract):
    """Shorter than a chunk, a prompt and what is generated, and no multiple of a block."""

    family, fields = "Mistral", {"sliding_window": 13}


class TestMistralWithoutAWindow(FamilyContract):
    family, fields, baseline = "Mistral", {"sliding_window": None, "head_dim": 32}, "llama"


class TestYarn(FamilyContract):
    family, fields, baseline = "Llama", {"rope_scaling": YARN}, "llama"


class TestMixtral(FamilyContract):
    family, fields = "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}


class TestMixtralWithAWindow(FamilyContract):
    family, fields = "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}


MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 16}


class TestQwen3Moe(FamilyContract):
    family, fields = "Qwen3Moe", {**MOE, "norm_topk_prob": True}


class TestQwen3MoeWithDenseLayers(FamilyContract):
    family, fields = (
        "Qwen3Moe",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    )


LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


class TestDeepseekV3(FamilyContract):
    family, baseline = "DeepseekV3", "latent"
    fields = {
        **LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    }  # fmt: skip


class TestDeepseekV3WithoutQueryCompression(FamilyContract):
    family, baseline = "DeepseekV3", "latent"
    fields = {
        **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_interleave": False,
        "norm_topk_prob": False,
    }  # fmt: skip


class TestDeepseekV2(FamilyContract):
    family, baseline = "DeepseekV2", "latent"
    fields = {
        **LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "n_shared_experts": 2, "norm_topk_prob": False,
    }  # fmt: skip


class TestDeepseekV2Lite(FamilyContract):
    family, baseline = "DeepseekV2", "latent"
    fields = {**LATENT, "q_lora_rank": 20, "topk_method": "greedy", "n_shared_experts": 2, "norm_topk_prob": False}


# what a config says and what is refused

MISTRAL = {**TINY, "architectures": ["MistralForCausalLM"], "rms_norm_eps": 1e-5, "sliding_window": 13}
QWEN3 = {**TINY, "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "head_dim": 16}
QWEN3_MOE = {**QWEN3, **MOE, "architectures": ["Qwen3MoeForCausalLM"]}
V2 = {
    **TINY, **LATENT, "architectures": ["DeepseekV2ForCausalLM"], "rms_norm_eps": 1e-6, "q_lora_rank": None,
    "n_shared_experts": 2,
}  # fmt: skip
V3 = {**V2, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a field nobody knows": (MISTRAL, {"attention_sinks": 4}, "attention_sinks"),
    "a field of another family": (MISTRAL, {"kv_lora_rank": 24}, "kv_lora_rank"),
    "a rope field nobody knows": (MISTRAL, {"rope_scaling": {**YARN, "twist": 2}}, "rope_scaling: twist"),
    "rope_parameters": (MISTRAL, {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
    "a dynamic rope": (QWEN3, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "a window on some layers": (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "a window in use": (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
    "biases of Mistral": (MISTRAL, {"attention_bias": True}, "attention_bias"),
    "another activation": (QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act"),
    "more experts a token than there are": (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "V2 with renormalised shares": (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
    "V2 with a scaled softmax": (V2, {"rope_scaling": {**YARN, "mscale_all_dim": 0.7}}, "rope_scaling"),
    "another way to choose": (V2, {"topk_method": "noaux_tc"}, "topk_method"),
    "another scoring": (V3, {"scoring_func": "softmax"}, "scoring_func"),
    "groups that do not divide": (V3, {"n_group": 3}, "groups"),
    "experts on some layers": (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
    "biases of DeepSeek": (V3, {"attention_bias": True}, "attention_bias"),
    "quantised weights": (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
}


@pytest.mark.parametrize(("base", "fields", "named"), REFUSED.values(), ids=REFUSED)
def test_a_field_is_refused_by_name(base: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    parse_config(base, "here")
    with pytest.raises(ModelError, match="here: ") as caught:
        parse_config({**base, **fields}, "here")
    assert named in caught.value.message and caught.value.code in ("unsupported_field", "config_invalid")


@pytest.mark.parametrize("field", ["num_key_value_heads", "rope_theta", "head_dim"])
def test_a_field_whose_default_differs_between_families_must_be_there(field: str) -> None:
    with pytest.raises(ModelError, match=f"lacks the field {field}"):
        parse_config({name: value for name, value in QWEN3.items() if name != field}, "here")


def test_fields_that_change_no_value_are_let_be() -> None:
    said = {"use_cache": True, "transformers_version": "4.0", "pad_token_id": 0, "attention_sinks": None}
    assert parse_config({**QWEN3, **said}, "here") == parse_config(QWEN3, "here")


# that these tests can fail, and what else depends on a family


def test_a_lost_window_would_be_seen(tmp_path: Path, artifacts: ArtifactStore) -> None:
    write_family(tmp_path, "Mistral", {"sliding_window": 13})
    expected = their_greedy(theirs(tmp_path), PROMPT, NEW)
    change(tmp_path, sliding_window=14)
    assert Ours(tmp_path, artifacts).greedy(PROMPT, NEW) != expected


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_a_missing_tensor_is_refused_by_name(family: str, tmp_path: Path, artifacts: ArtifactStore) -> None:
    case = {"Mixtral": TestMixtral, "DeepseekV3": TestDeepseekV3}[family]
    write_family(tmp_path, family, case.fields)
    change(tmp_path, **{"num_local_experts" if family == "Mixtral" else "n_routed_experts": 12})
    with pytest.raises(ModelError) as caught:
        Ours(tmp_path, artifacts)
    assert caught.value.code in ("missing_tensor", "wrong_shape") and "gate" in caught.value.message


def test_the_correction_that_chooses_experts_stays_float32(tmp_path: Path, artifacts: ArtifactStore) -> None:
    write_family(tmp_path, "DeepseekV3", TestDeepseekV3.fields)
    weights = Ours(tmp_path, artifacts, "bfloat16").model.weights
    assert weights["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert weights["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


YARNS: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "magnitudes": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
    "a given factor": {"factor": 8.0, "attention_factor": 1.3, "truncate": False},
}


@pytest.mark.parametrize("scaling", YARNS.values(), ids=YARNS)
def test_yarn_is_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = {**TINY, "head_dim": 64, "rope_scaling": {"rope_type": "yarn", **scaling}, "max_position_embeddings": 4096}
    config = parse_config({**raw, "architectures": ["LlamaForCausalLM"]}, "here")
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**raw), torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config), expected, rtol=1e-6, atol=0)
    cos, _ = rope_table(config, torch.float32)
    torch.testing.assert_close(cos[0, 0].item(), factor)


def test_a_step_reads_the_experts_of_one_token_at_least() -> None:
    config = parse_config(QWEN3_MOE, "here")
    layers = {n: s for n, s in expected_shapes(config).items() if "layers.0." in n and len(s) == 2}
    expert = sum(s[0] * s[1] for n, s in layers.items() if ".experts.0." in n)
    rest = sum(s[0] * s[1] for n, s in layers.items() if ".experts." not in n)
    assert expert == 3 * 48 * 64
    assert step_bytes(config, "bfloat16", layers=1) == 2 * (rest + 3 * expert + 384 * 64)


@pytest.mark.parametrize("case", [TestQwen3, TestDeepseekV3])
def test_a_planted_fault_is_one_here_too(case: type[FamilyContract], tmp_path: Path, artifacts: ArtifactStore) -> None:
    """Verification plants its faults in the family's own baseline: reading page tails brings in what lies there."""
    write_family(tmp_path, case.family, case.fields)
    ours = Ours(tmp_path, artifacts)
    assert bool(torch.isfinite(ours.step((0, PROMPT[:5], 0), (1, OTHER[:3], 0))).all())
    planted = LEAKY_TAIL.store(artifacts, artifacts.baseline(ours.model.config))
    ours.forward = load_forward(planted.path, planted.hash, ours.model, threads=1)
    assert bool(torch.isnan(ours.step((0, PROMPT[5:6], 5), (1, OTHER[3:4], 3))).any())


def test_a_host_serves_a_family(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """The sources that a baseline is built on are found inside the sandbox too."""
    write_family(tmp_path, "Mixtral", TestMixtral.fields)
    ours = Ours(tmp_path, artifacts)
    with HostClient(tmp_path, dtype="float32", threads=1, kv_bytes=1 << 22) as host:
        rig = Rig(host, artifacts.baseline(ours.model.config))
        played = rig.play(Script((tuple(PROMPT),), ((7,),)))
    torch.testing.assert_close(torch.from_numpy(played[0][0]), ours.step((0, PROMPT, 0))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [TestMixtral, TestDeepseekV3])
def test_the_profile_sees_every_operator(case: type[FamilyContract], tmp_path: Path, artifacts: ArtifactStore) -> None:
    """The probe's clocks reach the sources that a family's baseline is built on."""
    write_family(tmp_path, case.family, case.fields)
    ours = Ours(tmp_path, artifacts)
    probe = probe_artifact(artifacts, artifacts.baseline(ours.model.config))
    ours.forward = load_forward(probe.path, probe.hash, ours.model, threads=1)
    ours.greedy(PROMPT, 2)
    assert set(ours.forward.dispatch) == set(OPERATORS)
