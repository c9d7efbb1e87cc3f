"""The engine's device path under the interpreter: logits beside the baseline's, and proof that each kernel is in use."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import engine.device
from engine import wire
from engine.artifacts import ArtifactStore
from engine.baseline.forward import Forward as Baseline
from engine.batching import SeqStep, make_batch
from engine.contract import LoadedModel, Settings
from engine.device.forward import Forward
from engine.host import Host, to_batch
from engine.loader import load_forward, make_pool
from engine.models.weights import load_model
from tests.conftest import write_tiny_model
from tests.kernels.gpu.test_aot import kernel_names

TOKENS = [(i * i * 7 + 13 * i) % 290 + 3 for i in range(60)]
TABLES = ([5, 2, 7], [1, 6, 0])
SAME = {
    "rmsnorm_residual", "small_m_matmul", "gated_mlp", "qkv_rope_kv", "paged_decode_attention", "merge_splits",
    "prefill_attention", "lm_head", "argmax_tiles",
}  # fmt: skip
MIXTURE = {"moe_route", "moe_matmul"}
SPLITS = {"paged_decode_attention": {"SPLITS": 2}}  # the interpreter runs programs one after another


@pytest.fixture(scope="module", autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("device")
    write_tiny_model(folder, vocab_size=300, num_hidden_layers=1, max_position_embeddings=64, attention_bias=True)
    return load_model(folder, "float32")


@pytest.fixture(scope="module")
def right(tiny: LoadedModel) -> tuple[Tensor, Tensor]:
    return outputs(tiny)


def forward(model: LoadedModel, **settings: Any) -> Forward:
    return Forward(model, Settings({"triton": SPLITS, **settings}, 1))


def mixture(model: LoadedModel) -> LoadedModel:
    """The model with four experts in place of each MLP."""
    c, weights = model.config, {k: v for k, v in model.weights.items() if ".mlp." not in k}
    generator = torch.Generator().manual_seed(4)
    shapes = {"gate": (c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size)}
    shapes["up"] = shapes["gate"]
    for i in range(c.num_hidden_layers):
        prefix = f"model.layers.{i}.mlp"
        weights[f"{prefix}.gate.weight"] = torch.randn(4, c.hidden_size, generator=generator)
        for e in range(4):
            for part, shape in shapes.items():
                weights[f"{prefix}.experts.{e}.{part}_proj.weight"] = torch.randn(shape, generator=generator) * 0.1
    return LoadedModel(c, weights)


class BaselineMixture(Baseline):
    def mlp(self, i: int, x: Tensor) -> Tensor:
        p = f"model.layers.{i}.mlp"
        share, ids = self.linear(x, f"{p}.gate").softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for s, e in zip(share[t] / share[t].sum(), ids[t].tolist(), strict=True):
                h, q = x[t : t + 1], f"{p}.experts.{e}"
                h = F.silu(self.linear(h, f"{q}.gate_proj")) * self.linear(h, f"{q}.up_proj")
                out[t] += s * self.linear(h, f"{q}.down_proj")[0]
        return out


def conversation(run: Any, steps: int = 4) -> list[Tensor]:
    """Logits of a prefill, a chunk beside a decode, a decode of both, and a decode with the other sequence first."""
    pool = run.allocate(9)
    a, b = TABLES
    plans = [
        [SeqStep(1, TOKENS[:20], 0, a)],
        [SeqStep(1, TOKENS[20:21], 20, a), SeqStep(2, TOKENS[:18], 0, b, all_logits=True)],
        [SeqStep(1, TOKENS[21:22], 21, a), SeqStep(2, TOKENS[18:19], 18, b)],
        [SeqStep(2, TOKENS[19:27], 19, b), SeqStep(1, TOKENS[22:23], 22, a)],
    ]
    return [run(to_batch(make_batch(plan, 16)), pool) for plan in plans[:steps]]


def near(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-3) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance)


def test_every_kind_of_step_gives_the_baselines_logits(tiny: LoadedModel) -> None:
    ours = forward(tiny)
    near(conversation(ours), conversation(Baseline(tiny, Settings({}, 1))))
    assert set(ours.dispatch) == SAME
    layers, steps = tiny.config.num_hidden_layers, 4
    assert ours.dispatch["rmsnorm_residual"] == (2 * layers + 1) * steps
    assert ours.dispatch["gated_mlp"] == ours.dispatch["qkv_rope_kv"] == layers * steps
    assert ours.dispatch["paged_decode_attention"] == ours.dispatch["merge_splits"] == 3 * layers


def test_a_mixture_of_experts_gives_the_references_logits(tiny: LoadedModel) -> None:
    model = mixture(tiny)
    ours = forward(model)
    near(conversation(ours, 2), conversation(BaselineMixture(model, Settings({}, 1)), 2))
    assert set(ours.dispatch) == SAME - {"gated_mlp"} | MIXTURE


@pytest.mark.parametrize(("kind", "kernel", "tolerance"), [("fp8", "fp8_matmul", 0.2), ("int8", "int8_matmul", 0.05)])
def test_small_weights_give_near_logits_through_their_own_kernel(
    tiny: LoadedModel, kind: str, kernel: str, tolerance: float
) -> None:
    ours = forward(tiny, weights=kind)
    want = conversation(Baseline(tiny, Settings({}, 1)), 2)
    for g, w in zip(conversation(ours, 2), want, strict=True):
        assert float((g - w).norm() / w.norm()) < tolerance
    assert {kernel, "silu_mul"} <= set(ours.dispatch) and not {"small_m_matmul", "gated_mlp"} & set(ours.dispatch)


def test_int4_weights_multiply_what_they_stand_for(tiny: LoadedModel) -> None:
    ours = forward(tiny, weights="int4")
    got = conversation(ours, 1)[0]
    assert bool(torch.isfinite(got).all()) and "int4_matmul" in ours.dispatch


def test_together_the_paths_dispatch_to_every_kernel(tiny: LoadedModel) -> None:
    """fp8 activations begin at 64 rows, which one more parameter brings down to one."""
    seen: set[str] = set(MIXTURE)  # shown above
    for kind in ("same", "fp8", "int8", "int4"):
        ours = forward(tiny, weights=kind, triton={**SPLITS, "fp8_matmul": {"QUANTISE_FROM": 1}})
        conversation(ours, 2)
        if kind == "same":
            pool = ours.allocate(4)
            ours.copy_blocks(pool, [0], [1])
        seen |= set(ours.dispatch)
    assert seen == kernel_names()


@pytest.mark.parametrize("kernel", sorted(SAME))
def test_without_one_kernel_the_output_is_another(
    kernel: str, tiny: LoadedModel, right: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel in turn does nothing; its output stays zero, never what an earlier step left in memory."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    leave_out(kernel, monkeypatch)
    got = outputs(tiny)
    assert not torch.equal(got[0], right[0]) or not torch.equal(got[1], right[1])


def outputs(model: LoadedModel) -> tuple[Tensor, Tensor]:
    """(logits of a decode after a prefill, the greedy tokens)."""
    ours = forward(model)
    logits = conversation(ours, 2)[-1]
    assert ours.greedy is not None
    return logits, ours.greedy


def leave_out(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.gpu.launch import launch

    @functools.wraps(launch)
    def partly(which: Any, grid: Any, *args: Any, **named: Any) -> None:
        if which.__name__ != kernel:
            launch(which, grid, *args, **named)

    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.") and name.endswith(".triton"):
            monkeypatch.setattr(module, "launch", partly)


def test_greedy_tokens_are_the_logits_largest(right: tuple[Tensor, Tensor]) -> None:
    logits, greedy = right
    assert torch.equal(greedy, logits.argmax(-1))


def test_blocks_are_copied_and_carried_between_pools(tiny: LoadedModel) -> None:
    ours = forward(tiny)
    pool, other = ours.allocate(4), ours.allocate(4)
    for i, tensor in enumerate(pool.tensors):
        tensor[0] = i + 1
    ours.copy_blocks(pool, [0], [3])
    ours.import_blocks(other, [2], ours.export_blocks(pool, [3]))
    assert all(bool((t[2] == i + 1).all()) and not t[[0, 1, 3]].any() for i, t in enumerate(other.tensors))
    assert ours.dispatch == {"kv_copy": 3 * len(pool.tensors)}


def test_it_loads_as_a_candidate_like_any_other(tiny: LoadedModel, tmp_path: Path) -> None:
    folder = Path(next(iter(engine.device.__path__)))
    store = ArtifactStore(tmp_path)
    candidate = store.put({"forward.py": (folder / "forward.py").read_text()}, name="triton", device="cuda")
    loaded = load_forward(candidate.path, candidate.hash, tiny, 1)
    pool = make_pool(loaded, 1 << 16, "tests")
    assert pool.tensors[0].shape[1:] == (2, 16, 16)
    near([loaded(to_batch(make_batch([SeqStep(1, TOKENS[:5], 0, [1])], 16)), pool)],
         [conversation_start(Baseline(tiny, Settings({}, 1)))])  # fmt: skip


def test_the_hosts_status_carries_the_dispatch_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the host's own handlers and the wire; `set_num_threads` is left out as it would outlast this test."""
    write_tiny_model(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=64)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: None)
    host = Host(tmp_path / "model", "float32", 1, 1 << 17, [])
    folder = Path(next(iter(engine.device.__path__)))
    candidate = ArtifactStore(tmp_path).put(
        {"forward.py": (folder / "forward.py").read_text()}, name="triton", settings={"triton": SPLITS}
    )
    host.load(wire.Load(candidate.hash, str(candidate.path)))
    plan = [SeqStep(1, TOKENS[:5], 0, [1])]
    done = host.step(wire.Step(candidate.hash, make_batch(plan, 16), want_logits=True))
    assert len(done.logits) == 512 * 4
    status = msgspec.msgpack.decode(msgspec.msgpack.encode(host.status(wire.Status())), type=wire.HostStatus)
    assert status.dispatch["prefill_attention"] == "1" and status.dispatch["lm_head"] == "1"


def conversation_start(run: Any) -> Tensor:
    return run(to_batch(make_batch([SeqStep(1, TOKENS[:5], 0, [1])], 16)), run.allocate(3))


def test_what_it_cannot_do_is_refused_by_name(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match="power of two"):
        forward(tiny, block_size=12)
    with pytest.raises(ValueError, match="one of same, fp8"):
        forward(tiny, weights="int3")
