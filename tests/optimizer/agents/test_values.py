"""Every program an agent starts with computes the model: decode, prefill, chunks, mixed steps, poisoned slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.contract import LoadedModel
from engine.kv_cache import BlockManager
from engine.loader import make_pool
from engine.models.structure import RopeScaling
from engine.models.weights import load_model, with_layers
from kernels.build import has_compiler
from kernels.precision import exact
from optimizer.agents import KINDS
from optimizer.agents.programs.program import Program
from tests.optimizer.agents.support import build, build_files, kl, play

ALL_IDEAS = {Program.of(idea) for kind in KINDS for idea in kind.ideas}
IDEAS = sorted((p for p in ALL_IDEAS if all("llama" in part.baselines for part in p.chosen)), key=lambda p: p.name)
TOGETHER = [
    Program.parse("packed_linear + fused_qkv + postops + joint_kv + rms_norm + rolled_rope + expand_prefill"),
    Program.parse("packed_linear + fused_qkv + fused_gate_up + head_major + bmm_decode + pure_steps (block_size=64)"),
    Program.parse("paged_attention + split_linear + fused_qkv + fused_gate_up + rms_norm + rolled_rope + last_rows"),
    Program.parse("paged_attention + packed_linear + postops (block_size=64, PM_SPAN=64)"),
    Program.parse("whole_step (PM_LAYOUT=0, PM_ROW_TILE=4, block_size=64)"),
    Program.parse("whole_step (PM_WEIGHT_BITS=8)"),
    Program.parse("whole_step (PM_KV_BITS=8)"),
    Program.parse("whole_step (PM_KV_BITS=8, PM_WEIGHT_BITS=8, layers_apart=1)"),
    Program.parse("paged_attention + packed_linear + postops (PM_KV_BITS=8)"),
]
QUANTISED_KL = 0.01  # what a declared lower precision may cost
LEFT_OUT = {"compile", "triton", *(() if has_compiler() else ("cpp",))}  # tests/kernels/gpu runs what needs Triton
RUNNABLE = [p for p in [*IDEAS, *TOGETHER] if p.mechanism not in LEFT_OUT]
FLOAT32 = [p for p in RUNNABLE if all(not part.dtypes or "float32" in part.dtypes for part in p.chosen)]


def names(program: Program) -> str:
    return program.name


@pytest.fixture(scope="module")
def float_model(tiny_model: Path) -> LoadedModel:
    return load_model(tiny_model, "float32")


@pytest.fixture(scope="module")
def half_model(tiny_model: Path) -> LoadedModel:
    return load_model(tiny_model, "bfloat16")


def reference(model: LoadedModel, program: Program) -> torch.Tensor:
    """The baseline's logits for the script at the program's block size, which decides the lengths in it."""
    size = program.settings.get("block_size", 32 if "whole_step" in program.parts else 16)
    return play(build(Program(), model, block_size=size), model.config.vocab_size)


@pytest.mark.parametrize("program", FLOAT32, ids=names)
def test_it_computes_the_float32_model(program: Program, float_model: LoadedModel) -> None:
    got = play(build(program, float_model), float_model.config.vocab_size)
    torch.testing.assert_close(got, reference(float_model, program), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("program", RUNNABLE, ids=names)
def test_it_is_as_close_to_float32_as_the_baseline_is_in_bfloat16(
    program: Program, float_model: LoadedModel, half_model: LoadedModel
) -> None:
    truth = reference(float_model, program)
    got = play(build(program, half_model), half_model.config.vocab_size)
    limit = 1.25 * kl(truth, reference(half_model, program)) + 1e-4
    assert kl(truth, got) <= (limit if exact(program.precision) else QUANTISED_KL)


@pytest.mark.parametrize("program", RUNNABLE, ids=names)
def test_what_lies_in_free_slots_never_reaches_a_result(program: Program, half_model: LoadedModel) -> None:
    forward = build(program, half_model)
    vocab = half_model.config.vocab_size
    clean, nan, foreign = (play(forward, vocab, fill) for fill in (0.0, float("nan"), 1e4))
    assert torch.equal(clean, nan) and torch.equal(clean, foreign)


@pytest.mark.parametrize("program", RUNNABLE, ids=names)
def test_it_runs_with_fewer_layers_and_leaves_the_weights_alone(program: Program, half_model: LoadedModel) -> None:
    short = with_layers(half_model, 1)
    before = {name: tensor.clone() for name, tensor in half_model.weights.items()}
    full = play(build(program, half_model), half_model.config.vocab_size)
    got = play(build(program, short), half_model.config.vocab_size)
    limit = 1e-3 if exact(program.precision) else QUANTISED_KL
    assert kl(reference(short, program), got) < limit < kl(full, got)
    assert all(torch.equal(before[name], tensor) for name, tensor in half_model.weights.items())


@pytest.mark.parametrize("program", [p for p in RUNNABLE if "whole_step" not in p.parts], ids=names)
def test_it_serves_projections_with_biases(program: Program, half_model: LoadedModel) -> None:
    layers, generator = half_model.config.num_hidden_layers, torch.Generator().manual_seed(1)
    matrices = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(layers) for part in "qkvo"]
    sizes = {name: half_model.weights[f"{name}.weight"].shape[0] for name in matrices}
    biases = {f"{name}.bias": torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    model = LoadedModel(replace(half_model.config, attention_bias=True), {**half_model.weights, **biases})
    limit = 1e-3 if exact(program.precision) else QUANTISED_KL
    assert kl(reference(model, program), play(build(program, model), model.config.vocab_size)) < limit


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_the_whole_step_serves_biases_of_queries_keys_and_values_and_yarn(half_model: LoadedModel) -> None:
    generator, weights = torch.Generator().manual_seed(2), dict(half_model.weights)
    for i in range(half_model.config.num_hidden_layers):
        for name in (f"model.layers.{i}.self_attn.{part}_proj" for part in "qkv"):
            weights[f"{name}.bias"] = torch.randn(len(weights[f"{name}.weight"]), generator=generator).bfloat16()
    yarn = RopeScaling("yarn", factor=4.0, original_max_position=64, attention_factor=1.14)
    model = LoadedModel(replace(half_model.config, attention_bias=True, rope_scaling=yarn), weights)
    program = Program.of(["whole_step"])
    assert kl(reference(model, program), play(build(program, model), model.config.vocab_size)) < 1e-3


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_the_same_memory_holds_more_blocks_of_integers(half_model: LoadedModel) -> None:
    found = []
    for name in ("whole_step", "whole_step (PM_KV_BITS=8)"):
        pool = make_pool(build(Program.parse(name), half_model), 1 << 20, "tests")
        found.append(BlockManager(len(pool.tensors[0]), pool.block_size, pool.writer_hash).available)
        assert sum(t.nbytes for t in pool.tensors) <= 1 << 20
    whole, integers = found
    # a head of this model has 16 numbers: 32 bytes in bf16, and 16 with 2 for the scale in integers
    assert integers == (1 << 20) * 16 // 18 // (32 * half_model.config.kv_width * half_model.config.num_hidden_layers)
    assert integers / whole == pytest.approx(32 / 18, abs=0.02)


def test_these_tests_catch_a_program_that_reads_past_a_context(half_model: LoadedModel) -> None:
    fine = Program.of(["rms_norm"]).files()["forward.py"]
    leaky = fine.replace("            position = position * held\n", "")
    assert leaky != fine
    forward, vocab = build_files({"forward.py": leaky}, half_model, {}), half_model.config.vocab_size
    assert not torch.equal(play(forward, vocab, 0.0), play(forward, vocab, float("nan")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_compiled_pointwise_computes_the_model(half_model: LoadedModel) -> None:
    program = Program.of(["compiled_pointwise"])
    got = play(build(program, half_model), half_model.config.vocab_size)
    assert kl(reference(half_model, program), got) < 1e-3
