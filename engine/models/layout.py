"""What a folder's weight files hold, read from their headers alone: a folder that cannot be served is refused in milliseconds.

Torch-free, so that a form or a command can say at once which shard or tensor is missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.models.config import Experts, LatentAttention, ModelConfig
from engine.models.errors import ModelError

COPY_AGAIN = "Copy the file again."
SERVED = {"F32", "F16", "BF16"}
CORRECTION = "gate.e_score_correction_bias"  # float32 in any model: rounded, it would choose other experts


def check_weights(folder: Path, config: ModelConfig) -> list[Path]:
    """The weight files of `folder`, every tensor that `config` needs in one of them, of the right shape and a served dtype.

    Raises ModelError naming the shard or tensor that is missing, damaged or wrong.
    """
    shards = _shards(Path(folder))
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for shard in shards:
        found |= _header(shard)
    for name, shape in expected_shapes(config).items():
        if name not in found:
            raise ModelError("missing_tensor", f"{folder} lacks the tensor {name}.", COPY_AGAIN)
        held, dtype = found[name]
        if held != shape:
            raise ModelError("wrong_shape", f"{folder}: {name} is {held}, and config.json asks for {shape}.")
        if dtype not in SERVED:
            mend = "Serve float32, bfloat16 or float16 weights."
            raise ModelError("wrong_dtype", f"{folder}: {name} holds {dtype}.", mend)
    return shards


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> shape, dtype."""
    try:
        with safe_open(path, framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
            return {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError("weights_damaged", f"{path} cannot be read: {error}.", COPY_AGAIN) from error


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the architecture needs, with its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    attention = _attention(config) if config.latent is None else _latent_attention(config, config.latent)
    attention |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    dense = _gated("mlp", hidden, config.intermediate_size)
    sparse = {} if config.experts is None else _experts(hidden, config.experts)
    for i in range(config.num_hidden_layers):
        mlp = sparse if config.experts is not None and i in config.experts.layers else dense
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in (attention | mlp).items()}
    return shapes


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
    }
    if config.attention_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (size,) for part, size in (("q", q), ("k", kv), ("v", kv))}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.head_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
    return shapes


def _latent_attention(config: ModelConfig, latent: LatentAttention) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q = heads * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if not latent.q_rank:
        return shapes | {"self_attn.q_proj.weight": (q, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (latent.q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (latent.q_rank,),
        "self_attn.q_b_proj.weight": (q, latent.q_rank),
    }


def _gated(
    prefix: str, hidden: int, size: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (size, hidden), up: (size, hidden), down: (hidden, size)}


def _experts(hidden: int, experts: Experts) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{experts.block}.gate.weight": (experts.count, hidden)}
    if experts.scoring == "sigmoid":
        shapes[f"{experts.block}.{CORRECTION}"] = (experts.count,)
    names = (experts.gate, experts.up, experts.down)
    for expert in range(experts.count):
        shapes |= _gated(f"{experts.block}.experts.{expert}", hidden, experts.intermediate_size, names)
    if experts.shared_size:
        shapes |= _gated(f"{experts.block}.shared_experts", hidden, experts.shared_size)
    return shapes


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError("index_damaged", f"{index} cannot be read: {error}.", COPY_AGAIN) from error
        for name in names:
            if not (folder / name).is_file():
                raise ModelError("missing_shard", f"{folder} lacks the shard {name} that its index names.", COPY_AGAIN)
        return [folder / name for name in names]
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            "missing_weights", f"{folder} has no model.safetensors.", "Copy the weights in safetensors form."
        )
    return [folder / "model.safetensors"]
