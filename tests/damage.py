"""Ways in which a model folder is taken apart, shared by the tests of the engine and of the pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def shard(folder: Path) -> None:
    """The weights in two files with an index, as large checkpoints come."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {n: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_the_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{")


def lose_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def turn_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(7)}))


def whole_numbers(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
