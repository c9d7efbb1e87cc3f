"""What the kernel tests share: libraries built once, operators' glue as candidates paste it, steps and random models."""

from __future__ import annotations

import ctypes
import hashlib
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import build, registry
from kernels.hardware import detect
from tests import paths

AVX512_BF16 = ("avx512_bf16", "avx512bw", "avx512dq", "avx512vl")
ISA_NEEDS = {
    5: (*AVX512_BF16, "amx_bf16", "amx_tile"),
    4: AVX512_BF16,
    3: ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    2: ("avx2", "fma"),
    0: (),
}
EMULATED = "emulated tiles"


def instruction_sets() -> list[str]:
    """The PM_ISA values that this CPU can run, and tile registers in plain C++, which every CPU can."""
    features = set(detect().features)
    return [EMULATED, *(str(isa) for isa, needs in ISA_NEEDS.items() if features.issuperset(needs))]


def library_for(op: str, isa: str, values: Mapping[str, int] | None = None) -> ctypes.CDLL:
    """The operator built for one of `instruction_sets()`."""
    if isa != EMULATED:
        return library(op, values, PM_ISA=int(isa))
    if "PM_LAYOUT" not in registry.load(op).defaults():
        pytest.skip("the operator has no bf16 weights, which tiles are for")
    return library(op, values, PM_AMX_EMULATE=1)


def library(op: str, values: Mapping[str, int] | None = None, **defines: int) -> ctypes.CDLL:
    text = registry.instantiate(op, values)
    folder = paths.test_data() / "kernel-builds"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{op}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    if not source.exists():
        build.write_atomically(source, text.encode())
    result = build.compile_cpp(source, out_dir=folder, defines={name: str(value) for name, value in defines.items()})
    assert result.path is not None, result.log
    return ctypes.CDLL(str(result.path))


@cache
def glue(op: str) -> types.ModuleType:
    """An operator's glue run as a module of its own, as in a candidate."""
    module = types.ModuleType(f"glue_{op}")
    exec(compile(registry.load(op).glue_text, f"{op}/glue.py", "exec"), module.__dict__)
    return module


def step(
    sequences: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int, every_row: bool = False
) -> Any:
    """An engine batch of (token ids, position of the first, block table) a sequence; logits of its last row or of all."""
    ids, positions, starts, lengths, slots, rows = [], [], [0], [], [], []
    table = torch.full((len(sequences), max(len(t) for *_, t in sequences)), -1, dtype=torch.int32)
    for i, (tokens, first, blocks) in enumerate(sequences):
        at = range(first, first + len(tokens))
        ids += list(tokens)
        positions += list(at)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in at]
        starts.append(len(ids))
        lengths.append(first + len(tokens))
        rows += range(starts[-2], starts[-1]) if every_row else [len(ids) - 1]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return SimpleNamespace(
        token_ids=torch.tensor(ids), positions=torch.tensor(positions), slot=torch.tensor(slots), logit_rows=torch.tensor(rows),
        query_start=torch.tensor(starts, dtype=torch.int32), context_len=torch.tensor(lengths, dtype=torch.int32), block_table=table,
    )  # fmt: skip


def model_config(
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int = 131,
    layers: int = 2,
    tied: bool = True,
) -> Any:
    return SimpleNamespace(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        vocab_size=vocab, num_hidden_layers=layers, tie_word_embeddings=tied, rms_norm_eps=1e-5, rope_theta=10000.0,
        rope_scaling=None, max_position_embeddings=1024,
    )  # fmt: skip


def random_weights(config: Any, bias: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """bf16 weights scaled so that activations stay near one."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    weights = {
        "model.embed_tokens.weight": random(config.vocab_size, h, scale=1.0),
        "model.norm.weight": 1 + random(h, scale=0.1),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = random(config.vocab_size, h, scale=1.0)
    shapes = {"self_attn.q": (q, h), "self_attn.k": (kv, h), "self_attn.v": (kv, h), "self_attn.o": (h, q)}
    shapes |= {"mlp.gate": (f, h), "mlp.up": (f, h), "mlp.down": (h, f)}
    for i in range(config.num_hidden_layers):
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{i}.{name}_proj.weight"] = random(rows, columns, scale=columns**-0.5)
        for name in ("q", "k", "v") if bias else ():
            weights[f"model.layers.{i}.self_attn.{name}_proj.bias"] = random(shapes[f"self_attn.{name}"][0], scale=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + random(h, scale=0.1)
    return weights


def fresh_memo() -> Any:
    kept: dict[str, Any] = {}

    def memo(key: str, make: Any) -> Any:
        if key not in kept:
            kept[key] = make()
        return kept[key]

    return memo


def write_source(folder: Path, text: str, name: str = "source.cpp") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def covering_values(op: str) -> list[dict[str, int]]:
    """Few valid parameter sets in which every value of every parameter appears at least once."""
    loaded = registry.load(op)
    missing = {(p.name, v) for p in loaded.params for v in p.values}
    rows: list[dict[str, int]] = []
    while missing:
        row = start_of_row(loaded, min(missing))
        for p in loaded.params:
            wanted = [v for v in p.values if (p.name, v) in missing and loaded.allows({**row, p.name: v})]
            if wanted and (p.name, row[p.name]) not in missing:
                row[p.name] = wanted[0]
        missing -= {(p.name, row[p.name]) for p in loaded.params}
        rows.append(row)
    return rows


def start_of_row(op: registry.Op, wanted: tuple[str, int]) -> dict[str, int]:
    """Defaults with `wanted` put in, and one other parameter changed where the two do not go together."""
    others = [{}, *({p.name: v} for p in op.params if p.name != wanted[0] for v in p.values)]
    rows = ({**op.defaults(), wanted[0]: wanted[1], **other} for other in others)
    return next(row for row in rows if op.allows(row))
