"""Weights of a Hugging Face folder, mapped from disk. Several processes of one machine share the pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.contract import LoadedModel
from engine.models.config import read_config
from engine.models.errors import ModelError
from engine.models.layout import CORRECTION, check_weights, expected_shapes


def load_model(folder: Path, dtype: str | None = None) -> LoadedModel:
    """The model in `folder`, its weights mapped without a copy where `dtype` (default: the checkpoint's) is already theirs.

    Raises ModelError for a missing shard, a damaged file, a missing tensor, a wrong shape or dtype.
    """
    config = read_config(folder)
    wanted = getattr(torch, dtype or config.torch_dtype, None)
    if wanted not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError("wrong_dtype", f"{dtype!r} is not a dtype to serve in.", "Use float32, bfloat16 or float16.")
    weights: dict[str, Tensor] = {}
    for shard in check_weights(folder, config):
        weights |= _read_shard(shard)
    needed = {name: weights[name] for name in expected_shapes(config)}
    return LoadedModel(
        config, {n: t.to(torch.float32 if n.endswith(CORRECTION) else wanted) for n, t in needed.items()}
    )


def with_layers(model: LoadedModel, layers: int) -> LoadedModel:
    """The same weights seen as a model of its first `layers` layers (0: all); repacked weights are shared too."""
    if layers in (0, model.config.num_hidden_layers):
        return model
    return LoadedModel(replace(model.config, num_hidden_layers=layers), model.weights, model.repacked)


def evenly_routed(model: LoadedModel) -> LoadedModel:
    """The model with routers that tell no token from another: how many rows an expert gets depends on the step's shape alone."""
    experts = model.config.experts
    routers = {f"model.layers.{i}.{experts.block}.gate.weight" for i in experts.layers} if experts else set()
    return LoadedModel(model.config, {n: torch.zeros_like(t) if n in routers else t for n, t in model.weights.items()})


def _read_shard(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
