"""Candidate source to a running forward pass: a new module per content hash, never a reload."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path

import torch

from engine.artifacts import read_artifact
from engine.contract import ForwardPass, KVPool, LoadedModel, Settings


class CandidateError(Exception):
    """The candidate does not meet the contract."""


def load_forward(path: Path, artifact_hash: str, model: LoadedModel, threads: int) -> ForwardPass:
    """Builds the candidate in folder `path`. Its files are checked against `artifact_hash` first.

    Raises ArtifactError for changed files, CandidateError for a missing `build`; what the candidate raises passes through.
    """
    artifact = read_artifact(path, artifact_hash)
    module = load_module(artifact.path, artifact_hash)
    build = getattr(module, "build", None)
    if not callable(build):
        raise CandidateError("forward.py does not define build(model, settings)")
    settings = Settings(artifact.manifest.settings, threads, artifact.library_paths)
    with torch.inference_mode():
        forward = build(model, settings)
    if not callable(forward) or not callable(getattr(forward, "allocate", None)):
        raise CandidateError("build() must return an object with allocate(blocks) and __call__(batch, kv)")
    return forward


def load_module(path: Path, artifact_hash: str) -> types.ModuleType:
    """Executes `forward.py` as a module of its own. It imports its other .py files from `.`: they are its package's."""
    name = f"candidate_{artifact_hash[:16]}"
    file = path / "forward.py"
    source = file.read_text()
    module = types.ModuleType(name)
    module.__file__, module.__path__, module.__package__ = str(file), [str(path)], name
    sys.modules[name] = module
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def make_pool(forward: ForwardPass, kv_bytes: int, writer_hash: str) -> KVPool:
    """A pool within `kv_bytes`. Raises CandidateError when the pool is not what the contract asks for."""
    one = forward.allocate(1)
    blocks = kv_bytes // one.bytes_per_block
    if blocks < 2:
        raise CandidateError(
            f"a block takes {one.bytes_per_block} bytes and the pool may hold {kv_bytes}: fewer than two blocks"
        )
    pool = forward.allocate(blocks)
    for tensor in pool.tensors:
        if tensor.shape[0] != blocks:
            raise CandidateError(
                f"dimension 0 of every pool tensor is the block: expected {blocks}, got {tuple(tensor.shape)}"
            )
    held = sum(t.nbytes for t in pool.tensors)
    if held > kv_bytes:
        raise CandidateError(f"allocate({blocks}) took {held} bytes and said {pool.bytes_per_block} a block")
    return KVPool(pool.tensors, pool.block_size, pool.bytes_per_block, writer_hash)
