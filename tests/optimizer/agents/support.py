"""Builds an agent's program for a model and plays a script of steps through it, on a pool with poisoned free slots."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batching import SeqStep, make_batch
from engine.contract import ForwardPass, KVPool, LoadedModel, Settings
from engine.host import filling, to_batch
from engine.loader import load_module
from engine.models.structure import baseline_of
from kernels.build import compile_cpp, write_atomically
from optimizer.agents.programs.program import Program
from tests.paths import test_data

BLOCKS = 40
numbers = itertools.count()


def build(program: Program, model: LoadedModel, **settings: Any) -> ForwardPass:
    """The program as the host would build it. C++ is compiled once and kept between test runs."""
    files = program.files(baseline_of(asdict(model.config)))
    return build_files(files, model, {**program.settings, **settings})


def build_files(files: Mapping[str, str], model: LoadedModel, settings: Mapping[str, Any]) -> ForwardPass:
    folder = Path(tempfile.mkdtemp(dir=test_data()))
    libraries = {}
    for file, text in files.items():
        if file.endswith(".cpp"):
            built = compile_cpp(source_of(file, text), out_dir=test_data() / "builds")
            assert built.ok and built.path is not None, built.log
            libraries[file.removesuffix(".cpp")] = built.path
        else:
            (folder / file).write_text(text)
    module = load_module(folder, f"{next(numbers):016}")
    shutil.rmtree(folder)
    with torch.inference_mode():
        forward: ForwardPass = module.build(model, Settings(settings, 2, libraries))
    return forward


def source_of(file: str, text: str) -> Path:
    """The text as a file that is there whole or not at all: another process of the tests may compile it at this moment."""
    source = test_data() / "agent-sources" / hashlib.sha256(text.encode()).hexdigest()[:16] / file
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(source, text.encode())
    return source


def pool(forward: ForwardPass, fill: float) -> KVPool:
    made = forward.allocate(BLOCKS)
    one = forward.allocate(1)
    assert made.bytes_per_block == one.bytes_per_block == sum(t[0].nbytes for t in made.tensors)
    for tensor in made.tensors:
        assert tensor.shape[0] == BLOCKS
        tensor.fill_(filling(tensor, fill))
    return made


def poison(kv: KVPool, blocks: list[int], fill: float) -> None:
    for tensor in kv.tensors:
        tensor[blocks] = filling(tensor, fill)


def script(size: int, vocab: int, seed: int = 0) -> Iterator[tuple[list[int], list[SeqStep]]]:
    """Steps for blocks of `size` tokens, each with the blocks that were given back before it and now hold anything.

    Prefill, decode, chunks, mixed steps, a step without logits, blocks that change hands, one row and sixteen.
    """
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    a, b, c = [7, 3, 30, 11], [5, 9], [21, 2]
    lengths = {0: 2 * size + 3, 1: 5, 2: size}
    tables = {0: a, 1: b, 2: c}
    yield [], [SeqStep(i, text(lengths[i]), 0, tables[i], all_logits=True) for i in tables]
    for _ in range(3):
        yield [], [SeqStep(i, text(1), lengths[i], tables[i]) for i in (2, 0, 1)]
        lengths = {i: n + 1 for i, n in lengths.items()}
    d = [14, 1, 33]
    yield [], [SeqStep(3, text(7), 0, d, wants_logits=False)]
    chunk = [SeqStep(3, text(size - 2), 7, d, wants_logits=False), SeqStep(0, text(1), lengths[0], a)]
    yield [], [SeqStep(1, text(1), lengths[1], b), *chunk]
    yield [], [SeqStep(3, text(5), size + 5, d), SeqStep(2, text(1), lengths[2], c)]
    yield [*b, 22], [SeqStep(4, text(size + 1), 0, [9, 22, 5], all_logits=True), SeqStep(3, text(1), size + 10, d)]
    yield [], [SeqStep(4, text(1), size + 1, [9, 22, 5])]
    free = [block for block in range(BLOCKS) if block not in {*a, *c, *d, 9, 22, 5}][:16]
    yield free, [SeqStep(10 + i, text(3 + i % 4), 0, [block]) for i, block in enumerate(free)]
    yield [], [SeqStep(10 + i, text(1), 3 + i % 4, [block]) for i, block in enumerate(free)]


def play(forward: ForwardPass, vocab: int, fill: float = float("nan"), seed: int = 0) -> Tensor:
    """Float32 logits of every row the script asks for, checked for shape, in order."""
    kv, rows = pool(forward, fill), []
    with torch.inference_mode():
        for freed, steps in script(kv.block_size, vocab, seed):
            poison(kv, freed, fill)
            batch = to_batch(make_batch(steps, kv.block_size))
            logits = forward(batch, kv)
            assert logits.dtype == torch.float32 and tuple(logits.shape) == (len(batch.logit_rows), vocab)
            rows.append(logits.clone())
    return torch.cat(rows)


def kl(reference: Tensor, other: Tensor) -> float:
    """Mean KL divergence of `other` from `reference`, both logits."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
