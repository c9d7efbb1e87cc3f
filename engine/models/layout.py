"""What a folder's weight files hold, read from their headers alone: a folder that cannot be served is refused in milliseconds.

Torch-free, so that a form or a command can say at once which shard or tensor is missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.models.config import ModelConfig
from engine.models.errors import ModelError

COPY_AGAIN = "Copy the file again."
SERVED = {"F32", "F16", "BF16"}


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
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config.attention_bias:
        per_layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,)}
        per_layer |= {"self_attn.v_proj.bias": (kv,), "self_attn.o_proj.bias": (hidden,)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in per_layer.items()}
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
