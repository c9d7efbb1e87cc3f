"""`config.json` of a Hugging Face folder as a checked, frozen `ModelConfig`. Torch-free. What it does not know it refuses by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError

ARCHITECTURES = {"LlamaForCausalLM": "llama"}
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling: `linear` divides positions; `llama3` rescales low frequencies (Llama 3.1 report, section 3.2)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. Sizes in elements, `max_position_embeddings` in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str


def read_config(folder: Path) -> ModelConfig:
    """Reads and checks `folder/config.json`. Raises ModelError naming the file and field."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(
            "model_not_found",
            f"{folder} is not a model folder: it has no config.json.",
            "Name a folder in Hugging Face layout, a .gguf file, or `demo`.",
        )
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it does not hold a JSON object")
    except ValueError as error:
        raise ModelError(
            "config_damaged", f"{path} cannot be read as JSON: {error}.", "Copy the file again."
        ) from error
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str) -> ModelConfig:
    """`ModelConfig` from the fields of a config.json; `where` names it in errors."""
    names = raw.get("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        raise ModelError(
            "unknown_architecture",
            f"{where}: architecture {names[0] if names else 'missing'!r} is not supported.",
            f"Supported: {', '.join(ARCHITECTURES)}.",
        )
    _refuse_unsupported(raw, where)
    hidden, heads = _whole(raw, "hidden_size", where), _whole(raw, "num_attention_heads", where)
    kv_heads = _whole(raw, "num_key_value_heads", where, heads)
    head_dim = _whole(raw, "head_dim", where, hidden // heads)
    if heads % kv_heads:
        raise ModelError("config_invalid", f"{where}: {heads} attention heads do not divide into {kv_heads} KV heads.")
    eos = raw.get("eos_token_id")
    return ModelConfig(
        model_type=ARCHITECTURES[names[0]],
        vocab_size=_whole(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_whole(raw, "intermediate_size", where),
        num_hidden_layers=_whole(raw, "num_hidden_layers", where),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_whole(raw, "max_position_embeddings", where, 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(raw.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(raw.get("rope_scaling"), where),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        torch_dtype=_dtype(raw, where),
    )


def _whole(raw: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError("config_invalid", f"{where}: {name} must be a whole number of at least 1, not {value!r}.")
    return value


def _dtype(raw: dict[str, Any], where: str) -> str:
    dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "float32")
    if dtype not in DTYPES:
        raise ModelError(
            "wrong_dtype", f"{where}: torch_dtype {dtype!r} is not supported.", f"Supported: {', '.join(DTYPES)}."
        )
    return dtype


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    allowed = {
        "hidden_act": ("silu",),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "sliding_window": (None,),
        "pretraining_tp": (1, None),
        "partial_rotary_factor": (1, 1.0, None),
    }
    for name, values in allowed.items():
        if name in raw and raw[name] not in values:
            raise ModelError(
                "unsupported_field", f"{where}: {name} = {raw[name]!r} is not supported.", "Serve a model without it."
            )


def _rope_scaling(raw: dict[str, Any] | None, where: str) -> RopeScaling | None:
    if not raw:
        return None
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise ModelError(
            "unsupported_field",
            f"{where}: rope_scaling type {kind!r} is not supported.",
            f"Supported: {', '.join(ROPE_TYPES)}.",
        )
    if kind == "default":
        return None
    return RopeScaling(
        kind,
        float(raw.get("factor", 1.0)),
        float(raw.get("low_freq_factor", 1.0)),
        float(raw.get("high_freq_factor", 4.0)),
        int(raw.get("original_max_position_embeddings", 8192)),
    )
