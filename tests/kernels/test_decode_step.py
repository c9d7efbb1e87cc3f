"""The whole step: model shapes, mixed batches, the cache it leaves, and that nobody's result depends on anybody else."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.host import filling
from engine.models.rope import rope_table
from kernels import registry
from kernels.decode_step import reference
from kernels.weight_only_matmul.reference import weights_turned_back
from tests.kernels import support
from tests.kernels.contract import KernelContract

IDS = torch.randint(0, 131, (2000,), generator=torch.Generator().manual_seed(3)).tolist()
Length = tuple[int, int]  # tokens in the cache after the step, query tokens


@dataclass(frozen=True)
class Case:
    lengths: tuple[Length, ...]
    hidden: int = 64
    ffn: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    tied: bool = True
    bias: bool = False

    def model(self) -> tuple[Any, dict[str, Tensor]]:
        config = support.model_config(self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim, tied=self.tied)
        return config, support.random_weights(config, self.bias)

    def steps(self, size: int) -> list[Any]:
        """A step that fills each cache (all but the last query tokens), then the step under test, all rows' logits."""
        tables, free = [], list(range(97))[::-1]
        for n, _ in self.lengths:
            tables.append([free.pop() for _ in range(-(-n // size))])
        parts = [
            (IDS[100 * i :], n, new, table)
            for i, ((n, new), table) in enumerate(zip(self.lengths, tables, strict=True))
        ]
        first = [(ids[: n - new], 0, table) for ids, n, new, table in parts if n > new]
        last = [(ids[n - new : n], n - new, table) for ids, n, new, table in parts]
        return [support.step(part, size, True) for part in (first, last) if part]


def kernel(library: ctypes.CDLL, case: Case, threads: int, size: int) -> Any:
    return support.glue("decode_step").WholeStep(
        library, *case.model(), rope_table, threads, support.fresh_memo(), size
    )


def plain_cache(config: Any, size: int, bits: int, blocks: int = 100) -> list[Tensor]:
    """An empty cache as the reference takes it: float32, or integers with their scales."""
    n, dim, first = 32 // bits, config.head_dim, (blocks, config.num_hidden_layers, config.num_key_value_heads)
    kinds = ((dim // n, size, n), (size // n, dim, n))
    numbers = [torch.zeros(*first, *kind, dtype=torch.float32 if bits == 16 else torch.int8) for kind in kinds]
    return numbers + [torch.zeros(*first, size, dtype=torch.bfloat16) for _ in range(2) if bits == 8]


def held(cache: Sequence[Tensor]) -> list[Tensor]:
    """The keys and values that a cache stands for, float32 in its layout."""
    keys, values, *scales = (t.float() for t in cache)
    if scales:
        by_token, by_group = scales[0].unsqueeze(-2).unsqueeze(-1), scales[1].unflatten(-1, (-1, values.shape[-1]))
        keys, values = keys * by_token, values * by_group.unsqueeze(-2)
    return [keys, values]


def halves(config: Any) -> list[Tensor]:
    """cos and sin as the reference takes them, float32 [positions, head_dim / 2]."""
    return [t[:, : config.head_dim // 2] for t in rope_table(config, torch.float32)]


def run(library: ctypes.CDLL, case: Case, threads: int, size: int = 32, poison: float = 0.0) -> list[Tensor]:
    step = kernel(library, case, threads, size)
    pools = step.allocate(100)
    for pool in pools:
        pool.fill_(filling(pool, poison))
    return [step(batch, pools) for batch in case.steps(size)]


MIXED = ((1, 1), (40, 1), (33, 2), (70, 30), (17, 17), (32, 1), (300, 1), (257, 9))


class TestDecodeStep(KernelContract):
    op = "decode_step"
    cases = {
        **{f"{s} sequences": Case(((33, 1),) * s) for s in range(1, 10)},
        "head size 64": Case(((20, 1), (9, 9)), 192, 384, 3, 1, 64),
        "head size 80": Case(((20, 1), (9, 9)), 160, 96, 4, 2, 80),
        "head size 128, untied, biased": Case(((20, 1), (9, 9)), 128, 96, 2, 1, 128, tied=False, bias=True),
        "odd widths": Case(((20, 1), (9, 9)), 75, 77, 3, 3, 32),
        "widths off every grid": Case(((20, 1), (9, 9)), 100, 90, 6, 2, 48),
        "one head of keys": Case(((20, 1), (9, 9)), 96, 64, 16, 1, 32),
        "wide rows": Case(((5, 1),), 512, 1024, 8, 4, 64),
        "mixed": Case(MIXED, 96, 200, 6, 2, 32),
    }
    mixed = "mixed"
    demo_kl = 2e-3

    def run(self, library: ctypes.CDLL, case: Any, threads: int, block_size: int = 32) -> list[Tensor]:
        return run(library, case, threads, block_size)

    def expected(self, case: Any, values: Mapping[str, int] = {}) -> list[Tensor]:
        config, weights = case.model()
        size, bits = (64 if values.get("PM_SPAN") == 64 else 32), values.get("PM_WEIGHT_BITS", 16)
        if bits < 12:  # what is left of the matrices after rounding; that of the inputs stays as an error
            weights = {
                k: weights_turned_back(w, bits, values["PM_GROUP"]) if "_proj.w" in k else w for k, w in weights.items()
            }
            head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
            weights["lm_head.weight"] = weights_turned_back(weights[head], bits, values["PM_GROUP"])
        cache, tables = plain_cache(config, size, values.get("PM_KV_BITS", 16)), halves(config)
        return [reference.forward_step(config, weights, batch, cache, *tables) for batch in case.steps(size)]

    def check(self, got: list[Tensor], want: list[Tensor], values: Mapping[str, int] = {}) -> None:
        """Eight-bit inputs, which come with integer weights, may be twice as far off."""
        limit = 0.012 if values.get("PM_WEIGHT_BITS", 16) >= 12 else 0.024
        for a, b in zip(got, want, strict=True):
            self.close(a, b, limit)

    def close(self, got: Tensor, want: Tensor, limit: float = 0.012) -> None:
        """bf16 activations against float32: logits within a few per cent of their spread."""
        assert got.dtype == torch.float32
        assert (got - want).abs().max() < 0.08 * want.std()
        assert (got - want).pow(2).mean().sqrt() < limit * want.std()

    @pytest.mark.parametrize("isa", support.instruction_sets())
    def test_no_bit_of_unused_cache_reaches_the_logits(self, isa: str) -> None:
        library, case = support.library_for(self.op, isa, self.values), self.cases["mixed"]
        clean = run(library, case, 2)
        for poison in (float("nan"), 1e30):
            for a, b in zip(clean, run(library, case, 2, poison=poison), strict=True):
                assert torch.equal(a, b)

    def test_poisoned_scratch_memory_changes_no_bit(self) -> None:
        for name in ("odd widths", "mixed"):
            step = kernel(self.build(), self.cases[name], 2, 32)
            results = []
            for fill in (0, 255):  # 255: every float and bf16 of it is NaN
                step.scratch = torch.full((1 << 23,), fill, dtype=torch.uint8)
                pools = step.allocate(100)
                results.append([step(batch, pools) for batch in self.cases[name].steps(32)])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b), name

    def test_the_cache_holds_what_the_reference_writes(self) -> None:
        case = self.cases["mixed"]
        step = kernel(self.build(), case, 2, 32)
        config, weights = case.model()
        pools, plain = step.allocate(100), plain_cache(config, 32, self.values.get("PM_KV_BITS", 16))
        for batch in case.steps(32):
            step(batch, pools)
            reference.forward_step(config, weights, batch, plain, *halves(config))
        for got, want in zip(held(pools), held(plain), strict=True):
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)

    @pytest.mark.parametrize("build", [{"PM_LAYOUT": 0}, {"PM_LAYOUT": 1}, support.EMULATED], ids=str)
    def test_batch_size_and_chunking_change_no_bit(self, build: Any) -> None:
        emulated = build == support.EMULATED
        if not emulated and not registry.load(self.op).allows({**self.values, **build}):
            pytest.skip("these weights are always repacked")
        library = support.library_for(self.op, build, self.values) if emulated else self.build(build)
        shape = (96, 200, 6, 2, 32)
        whole = run(library, Case(((270, 270),), *shape), 2)[-1]
        for new in (1, 5, 64, 269):
            assert torch.equal(run(library, Case(((270, new),), *shape), 2)[-1], whole[270 - new :]), (
                f"last {new} apart"
            )
        crowd = run(library, Case(((270, 1), *MIXED), *shape), 2)[-1]
        assert torch.equal(crowd[:1], whole[-1:])

    def test_only_the_rows_asked_for_come_back_in_their_order(self) -> None:
        case = self.cases["mixed"]
        step = kernel(self.build(), case, 2, 32)
        pools = step.allocate(100)
        for batch in case.steps(32):
            every = step(batch, pools)
        batch.logit_rows = torch.tensor([5, 0, 40])
        assert torch.equal(step(batch, pools), every[[5, 0, 40]])
        batch.logit_rows = torch.empty(0, dtype=torch.int64)
        assert step(batch, pools).shape == (0, 131)

    def test_fewer_layers_share_the_packed_weights(self) -> None:
        config, weights = self.cases["mixed"].model()
        memo, make = support.fresh_memo(), support.glue(self.op).WholeStep
        library = self.build()
        whole = make(library, config, weights, rope_table, 2, memo)
        fewer = make(library, SimpleNamespace(**{**vars(config), "num_hidden_layers": 1}), weights, rope_table, 2, memo)
        assert fewer.packed is whole.packed
        batch = support.step([([7, 8], 0, [0])], 32)
        assert not torch.equal(fewer(batch, fewer.allocate(1)), whole(batch, whole.allocate(1)))

    def test_layers_apart_in_the_cache_change_no_bit(self) -> None:
        case, library = self.cases["mixed"], self.build()
        apart = support.glue(self.op).WholeStep(library, *case.model(), rope_table, 2, support.fresh_memo(), 32, True)
        pools = apart.allocate(100)
        assert len(pools) == len(apart.allocate(0)) == 2 * len(apart.kinds())
        for got, want in zip([apart(b, pools) for b in case.steps(32)], run(library, case, 2), strict=True):
            assert torch.equal(got, want)

    def test_what_it_cannot_do_is_refused_by_name(self) -> None:
        library, make = self.build(), support.glue(self.op).WholeStep
        config, weights = Case(()).model()
        with pytest.raises(ValueError, match="load the model in bfloat16"):
            make(library, config, {k: v.float() for k, v in weights.items()}, rope_table, 2, support.fresh_memo())
        with pytest.raises(ValueError, match="block size"):
            make(library, config, weights, rope_table, 2, support.fresh_memo(), 24)

    def test_more_threads_than_cores_still_finish(self) -> None:
        case = self.cases["mixed"]
        few, many = (run(self.build({"PM_SPIN": 200}), case, threads) for threads in (1, 7))
        assert torch.equal(few[-1], many[-1])

    def test_between_steps_no_thread_uses_the_cpu(self) -> None:
        run(self.build(), self.cases["mixed"], 2)
        time.sleep(0.2)  # the runtime's own bounded spin ends
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1

    def test_on_the_demo_model_it_stays_near_float32(self, demo_model: Path) -> None:
        weights_module = pytest.importorskip("engine.models.weights")
        model = weights_module.load_model(demo_model, "bfloat16")
        step = support.glue(self.op).WholeStep(self.build(), model.config, model.weights, rope_table, 2, model.memo)
        batch = support.step([(IDS[:48], 0, [1, 0])], 32, every_row=True)
        pools = step.allocate(2)
        got = step(batch, pools)
        cache = plain_cache(model.config, 32, 16, blocks=2)
        want = reference.forward_step(model.config, model.weights, batch, cache, step.cos, step.sin)
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        assert (p.exp() * (p - q)).sum(-1).mean() < self.demo_kl
        sure = (want.topk(2).values @ torch.tensor([1.0, -1.0])) > 0.5
        assert torch.equal(got.argmax(-1)[sure], want.argmax(-1)[sure])


class TestCacheOfIntegers(TestDecodeStep):
    """The same promises of a cache in 8 bits, with weights in bf16."""

    values = {"PM_KV_BITS": 8}
    demo_kl = 4e-3
    cases = {
        **{f"head size {d}": Case(((70, 1), (9, 9)), 128, 96, 4, 2, d) for d in (64, 80, 96, 128)},
        "odd widths": Case(((20, 1), (9, 9)), 75, 77, 3, 3, 32),
        "one head of keys, biased": Case(((20, 1), (9, 9)), 96, 64, 16, 1, 32, tied=False, bias=True),
        "mixed": TestDecodeStep.cases["mixed"],
        "odd widths, mixed": Case(((70, 1), (33, 2), (300, 3)), 100, 90, 6, 2, 48),
    }

    def test_a_block_takes_little_more_than_half_the_memory(self) -> None:
        case = Case(((1, 1),), head_dim=64)
        whole, half = (kernel(support.library(self.op, {"PM_KV_BITS": bits}), case, 1, 32) for bits in (16, 8))
        assert half.bytes_per_block == sum(t[0].nbytes for t in half.allocate(1))
        assert half.bytes_per_block / whole.bytes_per_block == 66 / 128  # a byte a number, and two for the scale of 64


class TestCodedWeights(TestDecodeStep):
    """bf16 weights in 12 bits: the same weights, so the same logits but for the order of the few sums of listed ones."""

    values = {"PM_WEIGHT_BITS": 12}
    cases = {
        name: TestDecodeStep.cases[name]
        for name in ("7 sequences", "head size 128, untied, biased", "odd widths", "widths off every grid", "mixed")
    }

    def test_weights_of_every_size_are_what_they_were(self) -> None:
        """Over many powers of two a panel's table holds few of them: the others are listed, and none is lost."""
        case = Case(((20, 1), (9, 9)), 96, 112, 4, 2, 32)
        config, weights = case.model()
        spread = torch.Generator().manual_seed(11)
        for name, weight in weights.items():
            if name.endswith("proj.weight"):
                powers = torch.randint(-40, 1, weight.shape, generator=spread)
                weights[name] = (weight * torch.exp2(powers.float())).bfloat16()
        odd = replace_model(case, config, weights)
        plain, coded = (self.run(support.library(self.op, v), odd, 2) for v in ({}, self.values))
        for a, b in zip(plain, coded, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.std()))
        lost = {k: w.where(w.abs() > 2.0**-14, 0) if k.endswith("proj.weight") else w for k, w in weights.items()}
        wrong = self.run(support.library(self.op, self.values), replace_model(case, config, lost), 2)
        assert not torch.allclose(plain[-1], wrong[-1], rtol=1e-3, atol=1e-3 * float(plain[-1].std())), (
            "a lost weight shows"
        )


def replace_model(case: Case, config: Any, weights: dict[str, Tensor]) -> Any:
    """The case on these weights."""

    class Given(Case):
        def model(self) -> tuple[Any, dict[str, Tensor]]:
            return config, weights

    return Given(**{f.name: getattr(case, f.name) for f in fields(Case)})
