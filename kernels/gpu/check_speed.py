"""Bandwidth of the operators, decode steps of a whole model with and without CUDA graphs, and the swap between two variants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels.gated_mlp.triton import gated
from kernels.gpu.check_values import Shapes, error
from kernels.gpu.graphs import DecodeGraphs
from kernels.gpu.launch import counting
from kernels.gpu.linear import Params
from kernels.gpu.llama import load_model
from kernels.gpu.step import Model, StepInput, run_step
from kernels.kv_copy.triton import copy_blocks
from kernels.lm_head.triton import head_and_argmax
from kernels.paged_decode_attention.triton import decode_attention
from kernels.small_m_matmul.triton import matmul

OTHER: Params = {"small_m_matmul": {"SMALL_BLOCK_N": 32}, "paged_decode_attention": {"SPLITS": 8}}
STEP_LIMIT = 0.02  # relative error of logits between two variants of one step


def seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of `run` after a warm-up."""
    times = []
    for i in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        if i >= 2:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def device_seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of `run` on the device alone: ten of them in one CUDA graph, so that launching costs nothing."""
    if device.type != "cuda":
        return seconds(run, device, repeats)
    run()  # kernels compile, which a capture does not allow
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    return seconds(graph.replay, device, repeats) / 10


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(
    shapes: Shapes, device: torch.device, repeats: int = 30, sequences: int = 32
) -> dict[str, dict[str, float]]:
    """Bytes that must move a second, in GB/s, by operator; `memory` is torch's own copy."""
    s, found = shapes, {}

    def measure(name: str, moved: int, run: Callable[[], Any]) -> None:
        each = device_seconds(run, device, repeats)
        found[name] = {"seconds": each, "gb_per_s": moved / each / 1e9}

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    big = empty(8 * s.ffn, s.hidden)
    copy = torch.empty_like(big)
    measure("memory", 2 * big.nbytes, lambda: copy.copy_(big))
    for rows in (1, 8):
        x = empty(rows, s.hidden)
        # larger than a GPU's cache, so that each run reads memory
        weight, up, head = empty(4 * s.ffn, s.hidden), empty(4 * s.ffn, s.hidden), empty(s.vocab, s.hidden)
        measure(f"small_m_matmul of {rows}", weight.nbytes, lambda x=x, w=weight: matmul(x, w))
        measure(f"gated_mlp of {rows}", 2 * weight.nbytes, lambda x=x, w=weight, up=up: gated(x, w, up))
        measure(f"lm_head of {rows}", head.nbytes, lambda x=x, head=head: head_and_argmax(x, head))
    keys, values, inputs = decode_inputs(s, sequences, device)
    q = empty(sequences, s.heads, s.head_dim)
    out, read = torch.empty_like(q), sequences * s.context * s.kv_heads * s.head_dim * 2 * 2
    common = (inputs.table, inputs.contexts, inputs.query_start, inputs.decode)
    measure(f"paged_decode_attention of {sequences}", read, lambda: decode_attention(q, keys, values, *common, out))
    measure("kv_copy", 2 * keys.nbytes, lambda: copy_blocks(keys, values))
    return found


def decode_inputs(s: Shapes, rows: int, device: torch.device) -> tuple[Tensor, Tensor, StepInput]:
    """A layer's keys and values, zeroed, and a decode step of `rows` sequences at the end of full contexts."""
    each = -(-s.context // s.block_size)
    keys, values = (
        torch.zeros(rows * each, s.kv_heads, s.block_size, s.head_dim, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    at = torch.arange(rows, device=device)
    table = torch.arange(rows * each, dtype=torch.int32, device=device).view(rows, each)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    last = s.context - 1
    step = StepInput(
        token_ids=at % s.vocab, positions=torch.full_like(at, last), query_start=starts, table=table, longest=0,
        slots=table[:, last // s.block_size].long() * s.block_size + last % s.block_size,
        contexts=torch.full_like(starts[:rows], s.context), decode=starts[:rows], prefill=starts[:0], logit_rows=at,
    )  # fmt: skip
    return keys, values, step


class Checkpoint:
    """Random bf16 weights of a shape, resident once; `model` builds a variant of the step on them."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes, self.device, self.kept = shapes, device, {}
        self.weights = random_weights(shapes, device)

    def memo(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def addresses(self) -> set[int]:
        """Where everything lies that models built on this checkpoint share."""
        kept = [x if isinstance(x, tuple) else (x,) for x in self.kept.values()]
        return {t.data_ptr() for group in kept for t in group if t is not None}

    def model(self, kind: str = "same", params: Params | None = None) -> Model:
        s = self.shapes
        config = SimpleNamespace(num_hidden_layers=s.layers, num_attention_heads=s.heads, rms_norm_eps=1e-5)
        half = torch.arange(0, s.head_dim, 2, device=self.device) / s.head_dim
        angles = torch.outer(torch.arange(float(s.context), device=self.device), 500000.0**-half)
        rope = self.memo("rope", lambda: (angles.cos(), angles.sin()))
        return load_model(config, self.weights, rope, self.device, kind, params or {}, self.memo)

    def cache(self, rows: int) -> tuple[list[Tensor], StepInput]:
        """A cache of random content for all layers, and a decode step of `rows` sequences over it."""
        keys, values, step = decode_inputs(self.shapes, rows, self.device)
        cache = [torch.randn_like(t) for _ in range(self.shapes.layers) for t in (keys, values)]
        return cache, step


def random_weights(s: Shapes, device: torch.device) -> dict[str, Tensor]:
    """Weights under Hugging Face names, scaled so that activations stay near one; the head is the embedding."""
    generator = torch.Generator(device).manual_seed(1)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layer = {"self_attn.q_proj": (q, s.hidden), "self_attn.k_proj": (kv, s.hidden), "self_attn.v_proj": (kv, s.hidden)}
    layer |= {"self_attn.o_proj": (s.hidden, q), "mlp.gate_proj": (s.ffn, s.hidden), "mlp.up_proj": (s.ffn, s.hidden)}
    layer |= {
        "mlp.down_proj": (s.hidden, s.ffn),
        "input_layernorm": (s.hidden,),
        "post_attention_layernorm": (s.hidden,),
    }
    shapes = {"model.embed_tokens": (s.vocab, s.hidden), "model.norm": (s.hidden,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(s.layers) for name, shape in layer.items()}

    def random(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (values * shape[1] ** -0.5).bfloat16()

    return {f"{name}.weight": random(shape) for name, shape in shapes.items()}


def decode(checkpoint: Checkpoint, kind: str, batches: tuple[int, ...], repeats: int = 20) -> dict[str, dict[str, Any]]:
    """By batch size: what `decode_batch` finds of a model whose weights are kept as `kind`."""
    model = checkpoint.model(kind)
    return {f"{kind} batch {rows}": decode_batch(checkpoint, model, rows, repeats) for rows in batches}


def decode_batch(checkpoint: Checkpoint, model: Model, rows: int, repeats: int) -> dict[str, Any]:
    """Seconds a decode step launched and (on a GPU) replayed as a graph, and how far the two's logits lie apart."""
    device, (cache, step) = checkpoint.device, checkpoint.cache(rows)
    logits = run_step(model, step, cache)[0].clone()
    found: dict[str, Any] = {
        "launched_s": seconds(lambda: run_step(model, step, cache), device, repeats),
        "finite": bool(torch.isfinite(logits).all()),
    }
    if device.type == "cuda":
        graphs, dispatch = DecodeGraphs(model, step.table.shape[1], device), Counter()
        replayed = graphs.run(step, cache, dispatch)
        found["graph_error"] = error(replayed[0], logits) if replayed else float("inf")
        found["dispatch"] = dict(dispatch)
        found["graph_s"] = seconds(lambda: graphs.run(step, cache, dispatch), device, repeats)
        found["tokens_per_s"] = rows / found["graph_s"]
    return found


def swap(checkpoint: Checkpoint, rows: int = 4) -> dict[str, Any]:
    """Two variants resident on one copy of the weights: time to load the second, to switch, and values before and after."""
    device = checkpoint.device
    cache, step = checkpoint.cache(rows)
    first = checkpoint.model()
    before = run_step(first, step, cache)[0].clone()
    held = checkpoint.addresses()
    load_s = once(lambda: checkpoint.model(params=OTHER), device)
    second = checkpoint.model(params=OTHER)
    dispatch: Counter[str] = Counter()
    with counting(dispatch):
        compile_s = once(lambda: run_step(second, step, cache), device)
    active = first
    start = time.perf_counter()
    active = second
    switched = run_step(active, step, cache)[0].clone()
    wait(device)
    switch_s = time.perf_counter() - start
    after = run_step(first, step, cache)[0]
    return {
        "load_s": load_s,
        "first_step_s": compile_s,
        "switch_and_step_s": switch_s,
        "error_between": error(switched, before),
        "same_after": bool(torch.equal(before, after)),
        "weights_stayed": held == checkpoint.addresses(),
        "dispatch": dict(dispatch),
    }


def once(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start
