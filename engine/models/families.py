"""The model families: what each reads from a config.json beside the fields that all have, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.structure import Experts, LatentAttention

DEFAULTS_DIFFER = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Family:
    """`read` gives the fields of `ModelConfig` in which the family differs. It raises ModelError for what is not served."""

    model_type: str
    read: Callable[[Fields], dict[str, Any]]


def llama(fields: Fields) -> dict[str, Any]:
    return {"output_bias": fields.flag("attention_bias")}


def qwen2(fields: Fields) -> dict[str, Any]:
    """Biases on queries, keys and values, whatever the file says; none on the output."""
    fields.given(*DEFAULTS_DIFFER)
    _no_window_in_use(fields)
    return {"attention_bias": True}


def qwen3(fields: Fields) -> dict[str, Any]:
    fields.given(*DEFAULTS_DIFFER, "head_dim")
    _no_window_in_use(fields)
    return {"head_norm": True, "output_bias": fields.flag("attention_bias")}


def mistral(fields: Fields) -> dict[str, Any]:
    fields.given(*DEFAULTS_DIFFER, "sliding_window")
    fields.only("attention_bias", False)
    return {"sliding_window": _window(fields)}


def mixtral(fields: Fields) -> dict[str, Any]:
    """Softmax over all experts, the best renormalised (Jiang et al. 2024, section 2.1)."""
    found = mistral(fields)
    names = {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}
    count, per_token = _counts(fields, "num_local_experts")
    layers = tuple(range(fields.whole("num_hidden_layers")))
    return found | {"experts": Experts(count, per_token, fields.whole("intermediate_size"), layers, True, **names)}


def qwen3_moe(fields: Fields) -> dict[str, Any]:
    """Every `decoder_sparse_step`-th layer has experts, but for those named in `mlp_only_layers`."""
    fields.given(*DEFAULTS_DIFFER)
    _no_window_in_use(fields)
    step, dense = fields.whole("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    layers = tuple(i for i in range(fields.whole("num_hidden_layers")) if i not in dense and (i + 1) % step == 0)
    count, per_token = _counts(fields, "num_experts")
    size = fields.whole("moe_intermediate_size")
    experts = Experts(count, per_token, size, layers, fields.flag("norm_topk_prob"))
    return {"head_norm": True, "output_bias": fields.flag("attention_bias"), "experts": experts}


def deepseek_v2(fields: Fields) -> dict[str, Any]:
    """Softmax scores; whole groups are chosen by their best expert. The published code and transformers differ in what
    `norm_topk_prob` and yarn's mscale_all_dim do to this family, so a model with either is refused."""
    fields.only("norm_topk_prob", False)
    if (fields.get("rope_scaling") or {}).get("mscale_all_dim"):
        fields.refuse("rope_scaling", fields.get("rope_scaling"))
    grouped = fields.get("topk_method", "greedy") == "group_limited_greedy"
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("scoring_func", "softmax")
    groups = (fields.get("n_group", 1), fields.get("topk_group", 1))
    found = _deepseek(fields, scoring="softmax", normalise=False, groups=groups if grouped else (1, 1))
    return found | {"latent": _latent(fields, interleaved=True)}


def deepseek_v3(fields: Fields) -> dict[str, Any]:
    """Sigmoid scores; a correction takes part in choosing; groups are chosen by their two best (section 2.1.2)."""
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    groups = (fields.whole("n_group"), fields.whole("topk_group"))
    normalise = fields.flag("norm_topk_prob", True)
    found = _deepseek(fields, scoring="sigmoid", normalise=normalise, groups=groups)
    return found | {"latent": _latent(fields, interleaved=fields.flag("rope_interleave", True))}


def _deepseek(fields: Fields, scoring: str, normalise: bool, groups: tuple[int, int]) -> dict[str, Any]:
    fields.given(*DEFAULTS_DIFFER, "routed_scaling_factor", "first_k_dense_replace", "n_shared_experts")
    fields.only("moe_layer_freq", 1)
    fields.only("attention_bias", False)
    fields.get("qk_head_dim")  # the sum of two fields that are read
    size, (count, per_token) = fields.whole("moe_intermediate_size"), _counts(fields, "n_routed_experts")
    if count % groups[0] or not groups[1] <= groups[0]:
        raise ModelError("config_invalid", f"{fields.where}: {count} experts do not divide into groups {groups}.")
    first, last = fields.whole("first_k_dense_replace", least=0), fields.whole("num_hidden_layers")
    experts = Experts(
        count, per_token, size, tuple(range(first, last)), normalise, scoring, fields.number("routed_scaling_factor"),
        *groups, shared_size=size * fields.whole("n_shared_experts"),
    )  # fmt: skip
    return {"experts": experts, "head_dim": fields.whole("qk_rope_head_dim")}


def _latent(fields: Fields, interleaved: bool) -> LatentAttention:
    return LatentAttention(
        kv_rank=fields.whole("kv_lora_rank"),
        q_rank=fields.whole("q_lora_rank", 0, least=0),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
        interleaved=interleaved,
    )


def _counts(fields: Fields, name: str) -> tuple[int, int]:
    """All experts and those of a token."""
    count, per_token = fields.whole(name), fields.whole("num_experts_per_tok")
    if per_token > count:
        message = f"{fields.where}: num_experts_per_tok is {per_token}, and there are {count} experts."
        raise ModelError("config_invalid", message)
    return count, per_token


def _window(fields: Fields) -> int:
    return fields.whole("sliding_window") if fields.get("sliding_window") is not None else 0


def _no_window_in_use(fields: Fields) -> None:
    """Windows of a part of the layers are not served; a size that is not in use says nothing."""
    fields.only("use_sliding_window", False)
    for kind in fields.get("layer_types", []):
        if kind != "full_attention":
            fields.refuse("layer_types", kind)
    fields.get("sliding_window")
    fields.get("max_window_layers")


FAMILIES = {
    "LlamaForCausalLM": Family("llama", llama),
    "Qwen2ForCausalLM": Family("qwen2", qwen2),
    "Qwen3ForCausalLM": Family("qwen3", qwen3),
    "MistralForCausalLM": Family("mistral", mistral),
    "MixtralForCausalLM": Family("mixtral", mixtral),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qwen3_moe),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", deepseek_v2),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", deepseek_v3),
}
