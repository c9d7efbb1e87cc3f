"""Weights of a Hugging Face folder, mapped from disk. Several processes of one machine share the pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.contract import LoadedModel
from engine.models.config import ModelConfig, read_config
from engine.models.errors import ModelError

COPY_AGAIN = "Copy the file again."


def load_model(folder: Path, dtype: str | None = None) -> LoadedModel:
    """The model in `folder`, its weights mapped without a copy where `dtype` (default: the checkpoint's) is already theirs.

    Raises ModelError for a missing shard, a damaged file, a missing tensor, a wrong shape or dtype.
    """
    config = read_config(folder)
    wanted = getattr(torch, dtype or config.torch_dtype, None)
    if wanted not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError("wrong_dtype", f"{dtype!r} is not a dtype to serve in.", "Use float32, bfloat16 or float16.")
    weights: dict[str, Tensor] = {}
    for shard in _shards(Path(folder)):
        weights |= _read_shard(shard)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    checked = {name: _checked(weights, name, shape, folder) for name, shape in expected_shapes(config).items()}
    return LoadedModel(config, {n: t if t.dtype == wanted else t.to(wanted) for n, t in checked.items()})


def with_layers(model: LoadedModel, layers: int) -> LoadedModel:
    """The same weights seen as a model of its first `layers` layers (0: all); repacked weights are shared too."""
    if layers in (0, model.config.num_hidden_layers):
        return model
    return LoadedModel(replace(model.config, num_hidden_layers=layers), model.weights, model.repacked)


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


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError("weights_damaged", f"{path} cannot be read: {error}.", COPY_AGAIN) from error


def _checked(weights: dict[str, Tensor], name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    tensor = weights.get(name)
    if tensor is None:
        raise ModelError("missing_tensor", f"{folder} lacks the tensor {name}.", COPY_AGAIN)
    if tuple(tensor.shape) != shape:
        raise ModelError("wrong_shape", f"{folder}: {name} is {tuple(tensor.shape)}, and config.json asks for {shape}.")
    if not tensor.is_floating_point():
        raise ModelError(
            "wrong_dtype", f"{folder}: {name} holds {tensor.dtype}.", "Serve float32, bfloat16 or float16 weights."
        )
    return tensor
