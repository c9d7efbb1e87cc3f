"""Weights under Hugging Face names to a `step.Model` on a device: q, k, v in one matrix, weights quantised where asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.gated_mlp.triton import gate_of_both, gated
from kernels.gpu.linear import Linear, Params, quantise
from kernels.gpu.step import Layer, Model
from kernels.gpu.tunables import KERNEL
from kernels.moe.triton import experts_mlp, route

Memo = Callable[[str, Callable[[], Any]], Any]


class Config(Protocol):
    """What is read of a model's config; `num_experts_per_tok` only of a mixture of experts."""

    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float


@dataclass(frozen=True, slots=True)
class Loader:
    """Moves weights to `device` once: `memo` keeps them for every model that is built from the same checkpoint."""

    weights: Mapping[str, Tensor]
    device: torch.device
    kind: str  # one of tunables.KINDS: how the layers' matrices are kept
    params: Params
    memo: Memo

    def tensor(self, name: str) -> Tensor:
        return self.memo(f"triton:{self.device}:{name}", lambda: self.weights[name].to(self.device).contiguous())

    def stacked(self, prefix: str, names: tuple[str, ...]) -> Linear:
        """The linear layers `prefix.name` as one, their outputs one after another."""

        def make() -> tuple[Tensor, Tensor | None, Tensor | None]:
            parts = [self.weights[f"{prefix}.{n}.weight"] for n in names]
            biases = [self.weights[f"{prefix}.{n}.bias"] for n in names if f"{prefix}.{n}.bias" in self.weights]
            if biases and len(biases) < len(names):
                raise ValueError(f"{prefix}: some of {', '.join(names)} have a bias and some have none")
            weight, scale = quantise(torch.cat([p.to(self.device) for p in parts]), self.kind)
            return weight, scale, torch.cat([b.to(self.device) for b in biases]) if biases else None

        kept = self.memo(f"triton:{self.device}:{self.kind}:{prefix}.{'+'.join(names)}", make)
        return Linear(self.kind, *kept, self.params.get(KERNEL[self.kind]))

    def mlp(self, prefix: str, top_k: int) -> Callable[[Tensor], Tensor]:
        if f"{prefix}.gate.weight" in self.weights:
            return self.experts(prefix, top_k)
        down = self.stacked(prefix, ("down_proj",))
        if self.kind == "same":
            gate, up = (self.tensor(f"{prefix}.{n}_proj.weight") for n in ("gate", "up"))
            return lambda x: down(gated(x, gate, up, self.params.get("gated_mlp")))
        both = self.stacked(prefix, ("gate_proj", "up_proj"))
        return lambda x: down(gate_of_both(both(x)))

    def experts(self, prefix: str, top_k: int) -> Callable[[Tensor], Tensor]:
        """A mixture: `prefix.gate` routes, `prefix.experts.<e>.{gate,up,down}_proj` are the experts, never quantised."""
        router = Linear("same", self.tensor(f"{prefix}.gate.weight"), None, None, self.params.get("small_m_matmul"))
        count = router.weight.shape[0]

        def stack(part: str) -> Tensor:
            return torch.stack(
                [self.weights[f"{prefix}.experts.{e}.{part}_proj.weight"].to(self.device) for e in range(count)]
            )

        gate, up, down = (
            self.memo(f"triton:{self.device}:{prefix}.experts.{part}", lambda part=part: stack(part))
            for part in ("gate", "up", "down")
        )
        return lambda x: experts_mlp(x, gate, up, down, route(router(x), top_k), self.params.get("moe"))

    def layer(self, prefix: str, top_k: int) -> Layer:
        return Layer(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self.stacked(f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj")),
            out=self.stacked(f"{prefix}.self_attn", ("o_proj",)),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self.mlp(f"{prefix}.mlp", top_k),
        )


def load_model(
    config: Config, weights: Mapping[str, Tensor], rope: tuple[Tensor, Tensor], device: torch.device, kind: str,
    params: Params, memo: Memo,
) -> Model:  # fmt: skip
    """`rope` is (cos, sin), float32 [positions, head_dim / 2]. Raises ValueError for weights that cannot be kept as `kind`."""
    loader = Loader(weights, device, kind, params, memo)
    top_k = getattr(config, "num_experts_per_tok", 2)
    embedding = loader.tensor("model.embed_tokens.weight")
    cos, sin = (t.to(device).contiguous() for t in rope)
    return Model(
        embedding=embedding,
        layers=[loader.layer(f"model.layers.{i}", top_k) for i in range(config.num_hidden_layers)],
        norm=loader.tensor("model.norm.weight"),
        head=loader.tensor("lm_head.weight") if "lm_head.weight" in weights else embedding,
        cos=cos, sin=sin, heads=config.num_attention_heads, eps=config.rms_norm_eps, params=params,
    )  # fmt: skip
