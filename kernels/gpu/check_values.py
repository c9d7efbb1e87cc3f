"""Every operator's values against its float32 reference on the device at hand, at the shapes of a given model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8_matmul import reference as fp8
from kernels.fp8_matmul.triton import fp8_linear, quantise_fp8, quantise_rows
from kernels.gated_mlp import reference as mlp
from kernels.gated_mlp.triton import gate_of_both, gated
from kernels.gpu import tunables
from kernels.kv_copy import reference as kv
from kernels.kv_copy.triton import gather_blocks, scatter_blocks
from kernels.lm_head import reference as head
from kernels.lm_head.triton import head_and_argmax
from kernels.moe import reference as mixture
from kernels.moe.triton import experts_mlp, route
from kernels.paged_decode_attention import reference as one_token
from kernels.paged_decode_attention.triton import decode_attention
from kernels.prefill_attention import reference as chunks
from kernels.prefill_attention.triton import chunk_attention
from kernels.qkv_rope_kv import reference as rope
from kernels.qkv_rope_kv.triton import rope_and_cache
from kernels.rmsnorm_residual import reference as norms
from kernels.rmsnorm_residual.triton import add_rmsnorm
from kernels.small_m_matmul.reference import linear
from kernels.small_m_matmul.triton import matmul
from kernels.weight_only_matmul import reference as small
from kernels.weight_only_matmul.triton import int4_linear, int8_linear, quantise_int8

EPS = 1e-5
LIMIT = 0.03  # largest error over largest value that bf16 inputs, summed in float32 and rounded once, may show


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's sizes; `context` and `rows` are tokens of the attention and product checks, `experts` of the mixture."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rows: tuple[int, ...]
    experts: int
    block_size: int = 16

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


LLAMA_1B = Shapes(2048, 8192, 16, 32, 8, 64, 128256, 2048, (1, 8, 33, 300), 16)


class Values:
    """`run` gives each check's relative error. bf16 inputs from a fixed seed."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes, self.device = shapes, device
        self.generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator, device=self.device) * scale).bfloat16()

    def run(self) -> dict[str, float]:
        """Relative error by check. Raises nothing: what is too far is the caller's to judge against LIMIT."""
        found = {}
        for name, check in self.checks().items():
            got, want = check()
            found[name] = error(got, want)
        return found

    def checks(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        checks = {"rmsnorm_residual": self.norm, "qkv_rope_kv": self.rope, "moe": self.moe, "kv_copy": self.copies}
        checks |= {"paged_decode_attention": self.decode, "prefill_attention": self.prefill}
        has_fp8 = (
            self.device.type == "cpu" or torch.cuda.get_device_capability(self.device) >= tunables.CAPABILITY["fp8"]
        )
        if has_fp8 and self.device.type == "cuda":  # the interpreter's own rounding to fp8 loses carries
            checks["fp8_rows"] = self.fp8_rows
        for rows in self.shapes.rows:
            for name in ("small_m_matmul", "gated_mlp", "silu_mul", "lm_head", "argmax", "int8", "int4"):
                checks[f"{name} of {rows}"] = lambda name=name, rows=rows: self.product(name, rows)
            if has_fp8:
                checks[f"fp8 of {rows}"] = lambda rows=rows: self.product("fp8", rows)
        return checks

    def fp8_rows(self) -> tuple[Tensor, Tensor]:
        x = self.random(9, self.shapes.hidden)
        return fp8.turned_back(*quantise_rows(x)), fp8.turned_back(*fp8.quantise(x))

    def norm(self) -> tuple[Tensor, Tensor]:
        h = self.shapes.hidden
        x, r, w = self.random(9, h), self.random(9, h), self.random(h)
        got, want = (run(x, w, EPS, residual=r) for run in (add_rmsnorm, norms.add_rmsnorm))
        return torch.cat(got), torch.cat(want)

    def product(self, name: str, rows: int) -> tuple[Tensor, Tensor]:
        s = self.shapes
        x, weight = self.random(rows, s.hidden), self.random(s.ffn, s.hidden, scale=s.hidden**-0.5)
        if name == "small_m_matmul":
            return matmul(x, weight), linear(x, weight)
        if name == "gated_mlp":
            up = weight.flip(0).contiguous()
            return gated(x, weight, up), mlp.gated(x, weight, up)
        if name == "silu_mul":
            both = self.random(rows, 2 * s.ffn)
            return gate_of_both(both), mlp.gate_of_both(both)
        if name in ("lm_head", "argmax"):
            logits, greedy = head_and_argmax(x, weight)
            return (logits, linear(x, weight)) if name == "lm_head" else (greedy, head.greedy(logits))
        return self.quantised(name, x, weight)

    def quantised(self, kind: str, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, hidden], weight [ffn, hidden]; int4 takes random bytes instead, so that every level occurs."""
        s = self.shapes
        if kind == "int8":
            level, scale = quantise_int8(weight)
            return int8_linear(x, level, scale), linear(x, small.int8_turned_back(level, scale))
        if kind == "fp8":
            level, scale = quantise_fp8(weight)
            said = x
            if len(x) >= tunables.resolve("fp8_matmul")["QUANTISE_FROM"]:
                said = fp8.turned_back(*quantise_rows(x))
            return fp8_linear(x, level, scale), fp8.fp8_linear(said, level, scale)
        packed = torch.randint(0, 256, (s.ffn, s.hidden // 2), dtype=torch.uint8, device=self.device)
        scale = self.random(s.ffn, s.hidden // 128).float()
        return int4_linear(x, packed, scale), linear(x, small.int4_turned_back(packed, scale))

    def cache(self, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """(keys, values, block table int32 [sequences, B]) with scattered blocks."""
        s = self.shapes
        each = -(-s.context // s.block_size)
        shape = (sequences * each, s.kv_heads, s.block_size, s.head_dim)
        table = torch.randperm(shape[0], generator=self.generator, device=self.device).int().view(sequences, each)
        return self.random(*shape), self.random(*shape), table

    def attention(self, lengths: list[tuple[int, int]], decode: bool) -> tuple[Tensor, Tensor]:
        """Sequences as (context, query tokens)."""
        s = self.shapes
        keys, values, table = self.cache(len(lengths))
        starts = torch.tensor([0, *(n for _, n in lengths)], device=self.device).cumsum(0).int()
        q = self.random(int(starts[-1]), s.heads, s.head_dim)
        contexts = torch.tensor([n for n, _ in lengths], dtype=torch.int32, device=self.device)
        index, out = torch.arange(len(lengths), dtype=torch.int32, device=self.device), torch.empty_like(q)
        inputs = (q, keys, values, table, contexts, starts, index)
        if decode:
            decode_attention(*inputs, out)
            return out, one_token.decode_attention(*inputs)
        chunk_attention(*inputs, max(n for _, n in lengths), out)
        return out, chunks.chunk_attention(*inputs)

    def decode(self) -> tuple[Tensor, Tensor]:
        return self.attention([(self.shapes.context, 1), (17, 1), (1, 1), (self.shapes.context // 2 + 5, 1)], True)

    def prefill(self) -> tuple[Tensor, Tensor]:
        half = self.shapes.context // 2
        return self.attention([(self.shapes.context, half), (half + 3, half + 3), (40, 1)], False)

    def rope(self) -> tuple[Tensor, Tensor]:
        s, count = self.shapes, 5
        qkv = self.random(count, s.qkv)
        half = torch.arange(0, s.head_dim, 2, device=self.device) / s.head_dim
        angles = torch.outer(torch.arange(64.0, device=self.device), 10000.0**-half)
        keys, values, _ = self.cache(1)
        at = torch.arange(count, device=self.device)
        inputs = (qkv, angles.cos(), angles.sin(), at + 3, at)
        found = []
        for run in (rope_and_cache, rope.rope_and_cache):
            cache = keys.clone(), values.clone()
            q = run(*inputs, *cache, s.heads)
            found.append(torch.cat([q, *(t[0, :, :count].transpose(0, 1) for t in cache)], 1))
        return found[0], found[1]

    def moe(self) -> tuple[Tensor, Tensor]:
        s, count = self.shapes, self.shapes.experts
        x, logits = self.random(7, s.hidden), self.random(7, count)
        gate, up, down = (
            self.random(count, *shape, scale=shape[1] ** -0.5) for shape in [(256, s.hidden)] * 2 + [(s.hidden, 256)]
        )
        want = mixture.experts_mlp(x, gate, up, down, *mixture.route(logits, 2))
        return experts_mlp(x, gate, up, down, route(logits, 2)), want

    def copies(self) -> tuple[Tensor, Tensor]:
        pool, _, _ = self.cache(2)
        blocks = torch.tensor([3, 1], device=self.device)
        before = pool.clone()
        scatter_blocks(gather_blocks(pool, blocks), pool, blocks - 1)
        kv.scatter_blocks(kv.gather_blocks(before, blocks), before, blocks - 1)
        return pool, before


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value wanted; infinite where anything is not finite."""
    difference = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-9)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")
