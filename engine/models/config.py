"""`config.json` of a Hugging Face folder as a checked, frozen `ModelConfig`. Torch-free. What it does not know it refuses by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.families import FAMILIES
from engine.models.fields import Fields
from engine.models.structure import Experts, LatentAttention, RopeScaling, magnitude

__all__ = ["Experts", "LatentAttention", "ModelConfig", "RopeScaling", "parse_config", "read_config"]

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. Sizes in elements, `max_position_embeddings` and `sliding_window` in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # with latent attention: of the rotated part
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # of queries, keys and values
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    output_bias: bool = False  # of attention's output
    head_norm: bool = False  # every head's query and key are normalised before they are rotated
    sliding_window: int = 0  # positions that a query sees, its own included; 0: all
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def kv_width(self) -> int:
        """Numbers that a token keeps in the cache of one layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.num_key_value_heads * self.head_dim


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
    if not names or names[0] not in FAMILIES:
        raise ModelError(
            "unknown_architecture",
            f"{where}: architecture {names[0] if names else 'missing'!r} is not supported.",
            f"Supported: {', '.join(FAMILIES)}.",
        )
    fields, family = Fields(raw, where), FAMILIES[names[0]]
    _refuse_unsupported(fields)
    common = _common(fields)
    config = ModelConfig(model_type=family.model_type, **common | family.read(fields))
    fields.refuse_the_rest()
    return config


def _common(fields: Fields) -> dict[str, Any]:
    """What every family has."""
    heads, eos = fields.whole("num_attention_heads"), fields.get("eos_token_id")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        message = f"{fields.where}: {heads} attention heads do not divide into {kv_heads} KV heads."
        raise ModelError("config_invalid", message)
    positions = fields.whole("max_position_embeddings", 2048)
    return {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": fields.whole("hidden_size"),
        "intermediate_size": fields.whole("intermediate_size"),
        "num_hidden_layers": fields.whole("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": fields.whole("head_dim", fields.whole("hidden_size") // heads),
        "max_position_embeddings": positions,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": fields.number("rope_theta", 10000.0),
        "rope_scaling": _rope_scaling(fields, positions),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "attention_bias": fields.flag("attention_bias"),
        "bos_token_id": fields.get("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        "torch_dtype": _dtype(fields),
    }


def _dtype(fields: Fields) -> str:
    dtype = str(fields.get("torch_dtype") or fields.get("dtype") or "float32")
    if dtype not in DTYPES:
        raise ModelError(
            "wrong_dtype",
            f"{fields.where}: torch_dtype {dtype!r} is not supported.",
            f"Supported: {', '.join(DTYPES)}.",
        )
    return dtype


def _refuse_unsupported(fields: Fields) -> None:
    fields.only("hidden_act", "silu")
    for name in ("mlp_bias", "rope_interleaved", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"):
        fields.only(name, False)
    fields.only("pretraining_tp", 1)
    fields.only("partial_rotary_factor", 1)
    fields.only("quantization_config")


def _rope_scaling(fields: Fields, positions: int) -> RopeScaling | None:
    raw = fields.get("rope_scaling")
    if not raw:
        return None
    rope = Fields(raw, f"{fields.where}: rope_scaling")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    rope.get("type")  # some files carry both names
    if kind not in ROPE_TYPES:
        raise ModelError(
            "unsupported_field",
            f"{fields.where}: rope_scaling type {kind!r} is not supported.",
            f"Supported: {', '.join(ROPE_TYPES)}.",
        )
    found = {"kind": kind, "factor": rope.number("factor", 1.0)}
    if kind == "llama3":
        found |= {
            name: rope.number(name, default) for name, default in (("low_freq_factor", 1), ("high_freq_factor", 4))
        }
        found["original_max_position"] = rope.whole("original_max_position_embeddings", 8192)
    elif kind == "yarn":
        found |= _yarn(rope, positions)
    rope.refuse_the_rest(harmless=())
    return None if kind == "default" else RopeScaling(**found)


def _yarn(rope: Fields, positions: int) -> dict[str, Any]:
    """With the attention factor worked out: given, or the ratio of two magnitudes, or the magnitude of the factor."""
    factor = rope.number("factor")
    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    ratio = magnitude(factor, mscale) / magnitude(factor, all_dim) if mscale and all_dim else magnitude(factor)
    return {
        "original_max_position": rope.whole("original_max_position_embeddings", positions),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
        "attention_factor": rope.number("attention_factor", ratio),
        "mscale_all_dim": all_dim,
    }
