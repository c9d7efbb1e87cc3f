"""What a candidate meets: the only engine module that candidate source may import.

A candidate is a folder holding `manifest.json`, `forward.py` and any kernels it adds. `forward.py` exports

    def build(model: LoadedModel, settings: Settings) -> ForwardPass

One `Batch` is one engine step, flattened over its sequences, so that prefill, decode, chunked prefill and mixed steps are
the same call. Nothing here knows of requests, text, sockets or time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import rope_table
from engine.models.structure import Experts, magnitude

__all__ = [
    "DECODE",
    "PREFILL",
    "Batch",
    "Experts",
    "ForwardPass",
    "KVPool",
    "LoadedModel",
    "ModelConfig",
    "Settings",
    "magnitude",
    "rope_table",
]

CONTRACT_VERSION = 1
PREFILL, DECODE = 0, 1


@dataclass(frozen=True, slots=True)
class Batch:
    """One engine step over S sequences and T query tokens. All tensors are contiguous and live on the model's device.

    A sequence's keys and values at its query positions are to be written to `slot` before they are attended to; earlier
    positions are read through `block_table`. Entries of `block_table` past a sequence's last block are -1.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], position of each query token in its sequence
    query_start: Tensor  # int32 [S+1], sequence s owns rows query_start[s]:query_start[s+1]
    context_len: Tensor  # int32 [S], tokens in the cache after this step (its query tokens included)
    block_table: Tensor  # int32 [S, B]
    slot: Tensor  # int64 [T], block * block_size + offset
    logit_rows: Tensor  # int64 [R], the rows of T whose logits are asked for; several of a sequence to verify drafts
    request_id: Tensor  # int64 [S]
    phase: Tensor  # int8 [S], PREFILL or DECODE (DECODE: exactly one query token)


@dataclass(frozen=True, slots=True)
class KVPool:
    """A candidate's own KV storage; dimension 0 of every tensor is the block."""

    tensors: tuple[Tensor, ...]
    block_size: int  # tokens a block
    bytes_per_block: int
    writer_hash: str = ""  # set by the host: what wrote it (artifact, weights, layers)


class ForwardPass(Protocol):
    def allocate(self, blocks: int) -> KVPool: ...

    def __call__(self, batch: Batch, kv: KVPool) -> Tensor:
        """Float32 logits [R, vocab], a row for each of `batch.logit_rows`, in that order."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """Config and weights, mapped once and shared by every candidate of a host.

    `weights` uses Hugging Face names (`model.layers.0.self_attn.q_proj.weight`, [out, in]); they are read-only by
    agreement and checked by digest in verification. `config.num_hidden_layers` may be lower than the checkpoint's
    (tier 1 runs a few layers).
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    repacked: dict[str, Any] = field(default_factory=dict, repr=False)

    def memo(self, key: str, make: Callable[[], Any]) -> Any:
        """The value kept under `key`, made on first use: repacked weights, rope tables. Name the layout in the key."""
        if key not in self.repacked:
            self.repacked[key] = make()
        return self.repacked[key]


@dataclass(frozen=True)
class Settings:
    """A candidate's own settings from its manifest, with the threads it may use and the libraries built from its sources."""

    values: Mapping[str, Any]
    threads: int
    libraries: Mapping[str, Path] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def library(self, name: str) -> ctypes.CDLL:
        """The shared library compiled from `<name>.cpp` of this candidate. Raises KeyError for a source it does not have."""
        return ctypes.CDLL(str(self.libraries[name]))
