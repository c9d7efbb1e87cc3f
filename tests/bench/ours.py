"""One of our programs on one workload, in this process: prints a JSON line with tok/s of prefill and decode.

    python -m tests.bench.ours PROGRAM DIR|1b --data FOLDER [--prompt N --new N --batch N --threads N --repeats N]

PROGRAM is a candidate's name, such as `whole_step (PM_WEIGHT_BITS=8)`; DIR holds smol/ (peers/setup.sh). Prompts, greedy choice
and timing are those of peers/measure.py: text of the standard library, medians after two repeats. `1b` is a Llama of 1.04
billion random parameters, of which only decode is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.artifacts import Artifact, ArtifactStore
from engine.batching import SeqStep, make_batch
from engine.contract import KVPool, LoadedModel
from engine.host import to_batch
from engine.loader import load_forward
from engine.models.config import parse_config
from engine.models.layout import expected_shapes
from engine.models.weights import load_model
from kernels import microbenchmarks
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.records import Proposal
from tests.paths import SHARED

LARGE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
READ_BYTES = 1 << 30
WARM = 2  # repeats that are not counted, as in peers/measure.py


def artifact(name: str, data: Path) -> Artifact:
    """The program `name` built under `data`; `baseline` is the endpoint's own."""
    if name == "baseline":
        return ArtifactStore(data).baseline()
    p = Program.parse(name)
    proposal = Proposal(
        "bench",
        "bench",
        "projections",
        p.name,
        "measured beside other engines",
        p.mechanism,
        p.files(),
        p.settings,
        p.precision,
    )
    return Builder(data).build(proposal).artifact


def prompts(folder: str, batch: int, length: int, repeats: int) -> list[list[list[int]]]:
    """What peers/measure.py gives the other engines."""
    spec = importlib.util.spec_from_file_location("peers_measure", SHARED / "peers" / "measure.py")
    assert spec and spec.loader
    measure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure)
    return measure.prompts(measure.hf_tokenize(folder), batch, length, repeats)


def random_model() -> LoadedModel:
    config = parse_config(LARGE, "the 1B shape")
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config)
    return LoadedModel(
        config, {n: (torch.randn(*s, generator=generator) * s[-1] ** -0.5).bfloat16() for n, s in shapes.items()}
    )


class Runner:
    """Steps of `batch` sequences through a forward pass with a pool that holds them all."""

    def __init__(self, program: Artifact, model: LoadedModel, threads: int, batch: int, tokens: int) -> None:
        self.forward = load_forward(program.path, program.hash, model, threads)
        size = self.forward.allocate(0).block_size
        each = -(-tokens // size)
        self.pool: KVPool = self.forward.allocate(batch * each)
        self.tables = [list(range(b * each, (b + 1) * each)) for b in range(batch)]

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """The prompts one after another, as the scheduler's chunks come; the token that follows each."""
        return [self._run([SeqStep(i, ids, 0, self.tables[i])])[0] for i, ids in enumerate(prompts)]

    def step(self, ids: list[list[int]], start: int) -> list[int]:
        """One greedy step, all sequences at the same position; their next tokens."""
        return self._run(
            [SeqStep(i, new, start, table) for i, (new, table) in enumerate(zip(ids, self.tables, strict=True))]
        )

    def _run(self, rows: list[SeqStep]) -> list[int]:
        logits = self.forward(to_batch(make_batch(rows, self.pool.block_size)), self.pool)
        return [int(t) for t in logits.argmax(-1)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(runner: Runner, batches: list[list[list[int]]], new: int) -> dict[str, float]:
    """Medians over the repeats after the first WARM."""
    batch, prompt = len(batches[0]), len(batches[0][0])
    prefill, decode = [], []
    for ids in batches:
        first, tokens = timed(lambda ids=ids: runner.prefill(ids))

        def answer(tokens: list[int] = tokens) -> None:
            for i in range(new):
                tokens = runner.step([[t] for t in tokens], prompt + i)

        prefill.append(first)
        decode.append(timed(answer)[0])
    return {
        "prefill": batch * prompt / statistics.median(prefill[WARM:]),
        "decode": batch * new / statistics.median(decode[WARM:]),
    }


def large(program: Artifact, threads: int, new: int, repeats: int) -> dict[str, float]:
    """Decode rate of the 1B shape at short contexts, the weight bytes a second that it reads, and their share of what plain
    reading reaches in the same seconds: neighbours on the machine move both, so the two take turns.
    """
    model, read = random_model(), reader(threads)
    runner = Runner(program, model, threads, 1, new + 1)
    weights = sum(w.nbytes for n, w in model.weights.items() if w.dim() == 2 and "embed_tokens" not in n)
    rows = []
    for _ in range(repeats):
        seconds = timed(lambda: [runner.step([[7]], i) for i in range(new)])[0]
        rows.append((new / seconds, new * weights / seconds / 1e9, read()))
    rate, gbs, ceiling = (statistics.median(row[i] for row in rows[WARM:]) for i in range(3))
    share = statistics.median(row[1] / row[2] for row in rows[WARM:])
    return {"decode": rate, "gbs": gbs, "read_gbs": ceiling, "share": share}


def reader(threads: int) -> Callable[[], float]:
    """A function that reads READ_BYTES of random numbers once and says at how many GB/s."""
    loops, i64, pointer = microbenchmarks.library(Path(tempfile.mkdtemp())), ctypes.c_int64, ctypes.c_void_p
    assert loops is not None, "there is no C++ compiler"
    x = torch.empty(READ_BYTES // 4)
    loops.use_large_pages(pointer(x.data_ptr()), i64(x.nbytes))
    x.uniform_()
    return lambda: x.nbytes / timed(lambda: loops.read_all(pointer(x.data_ptr()), i64(x.nbytes), i64(threads)))[0] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("folder")
    parser.add_argument("--data", type=Path, required=True)
    for name, value in (("prompt", 512), ("new", 64), ("batch", 1), ("threads", 2), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    program = artifact(a.program, a.data)
    with torch.inference_mode():
        if a.folder == "1b":
            print(json.dumps(large(program, a.threads, a.new, a.repeats)))
            return
        model = load_model(Path(a.folder) / "smol", "bfloat16")
        runner = Runner(program, model, a.threads, a.batch, a.prompt + a.new + 1)
        print(json.dumps(measure(runner, prompts(a.folder, a.batch, a.prompt, a.repeats), a.new)))


if __name__ == "__main__":
    main()
