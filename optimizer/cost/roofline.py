"""The physical floor of a step on this machine: bytes over measured bandwidth or operations over measured rate.

Ceilings are measured (`kernels.ceilings`); a kind that was not measured takes a cautious default, and says so in the
estimate's provenance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.layout import expected_shapes
from kernels.precision import CODED, LOWEST, SAME, exact, of_cache, of_weights

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# of a number in a declared precision that is not the endpoint's
LOWER_BYTES = {"coded": 1.5, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "kv-int8": 1.0}
DEFAULTS = {"read_gbs": 10.0, "copy_gbs": 6.0, "gemm_bf16_flops": 5e10, "gemm_f32_flops": 5e10}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates in bytes and operations a second: the best that any processor of the machine gives, its GPU included."""

    read: float
    copy: float
    gemm: float
    measured: bool

    @classmethod
    def of(cls, found: Mapping[str, Any], dtype: str) -> Ceilings:
        gemm_name = "gemm_f32_flops" if dtype == "float32" else "gemm_bf16_flops"
        values = {
            name: max(_best(found.get(name)), _best(found.get(f"cuda_{name}")))
            for name in ("read_gbs", "copy_gbs", gemm_name)
        }
        measured = all(values.values())
        get = {name: value or DEFAULTS[name] for name, value in values.items()}
        return cls(get["read_gbs"] * 1e9, get["copy_gbs"] * 1e9, get[gemm_name], measured)


def _best(value: Any) -> float:
    """A ceiling may be one number or a number for each size: the best of them is the ceiling."""
    if isinstance(value, Mapping):
        return max((_best(v) for v in value.values()), default=0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What the traffic asks of one engine and what the baseline takes for it. Seconds are of one step at all layers."""

    concurrency: int
    isl: float
    osl: float
    prefill_tokens: int  # of the prefill step that was measured
    step_s: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds
    operators: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # phase -> operator -> seconds

    @property
    def context(self) -> float:
        return self.isl + self.osl / 2

    def weights(self) -> dict[str, float]:
        """Steps of each phase for one answered request, with `concurrency` requests sharing a decode step."""
        return {"prefill": self.isl / self.prefill_tokens, "decode": self.osl / self.concurrency}

    def request_s(self, step_s: Mapping[str, float]) -> float:
        return sum(n * step_s[phase] for phase, n in self.weights().items())

    @property
    def prefill_share(self) -> float:
        total = self.request_s(self.step_s)
        return self.weights()["prefill"] * self.step_s["prefill"] / total if total else 0.1


def lowest_allowed(dtype: str, tolerance: str) -> str:
    """The lowest precision that a run may compute in; coded weights change nothing, so every run of their dtype may."""
    return LOWEST if tolerance == "quantised" else CODED if dtype == "bfloat16" else SAME


def weights_read(config: ModelConfig) -> int:
    """Numbers in all layers' matrices that a step must read: of experts, those that a single token is sent to."""
    total, experts = 0.0, config.experts
    for name, shape in expected_shapes(config).items():
        if ".layers." in name and len(shape) == 2:
            share = experts.per_token / experts.count if experts and ".experts." in name else 1.0
            total += math.prod(shape) * share
    return round(total)


def weight_share(precision: str, dtype: str) -> float:
    """Weight bytes that a candidate of this precision must read, over those of the endpoint's dtype."""
    whole = DTYPE_BYTES[dtype]
    return LOWER_BYTES.get(of_weights(precision), whole) / whole


def cache_share(precision: str, dtype: str) -> float:
    """As `weight_share`, of the cache."""
    return LOWER_BYTES.get(of_cache(precision), DTYPE_BYTES[dtype]) / DTYPE_BYTES[dtype]


def step_bytes(config: ModelConfig, dtype: str, layers: int = 0) -> int:
    """Weight bytes that every step must read: the layers' matrices and the head."""
    config = replace(config, num_hidden_layers=layers or config.num_hidden_layers)
    return (weights_read(config) + config.vocab_size * config.hidden_size) * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Bound:
    """What an operator's step cannot go below, in seconds: its bytes at the measured rate, its operations at theirs."""

    bytes_s: float
    arithmetic_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.bytes_s, self.arithmetic_s)


def bounds(
    config: ModelConfig, dtype: str, ceilings: Ceilings, work: Workload, precision: str = "same"
) -> dict[str, dict[str, Bound]]:
    """phase -> operator -> what no step of the declared precision can go below."""
    share = weight_share(precision, dtype)
    # four 8-bit products take the time of two of bf16
    products, scores = (ceilings.gemm * (1 if exact(of(precision)) else 2) for of in (of_weights, of_cache))
    size, layers = DTYPE_BYTES[dtype], config.num_hidden_layers
    kv_token = config.kv_width * size * layers * cache_share(precision, dtype)
    q = config.num_attention_heads * config.head_dim
    result = {}
    for phase in ("prefill", "decode"):
        tokens = work.prefill_tokens if phase == "prefill" else work.concurrency
        sequences = 1 if phase == "prefill" else work.concurrency
        context = work.prefill_tokens / 2 if phase == "prefill" else work.context
        matrices, head = weights_read(config), config.vocab_size * config.hidden_size
        attention_flops = 4 * tokens * context * q * layers
        result[phase] = {
            "projections": Bound(share * matrices * size / ceilings.read, 2 * tokens * matrices / products),
            "head": Bound(share * head * size / ceilings.read, 2 * sequences * head / products),
            "attention": Bound(sequences * context * kv_token / ceilings.read, attention_flops / scores),
            "cache": Bound(tokens * kv_token / ceilings.copy),
            "pointwise": Bound(0.0),
        }
    return result


def floors(
    config: ModelConfig, dtype: str, ceilings: Ceilings, work: Workload, precision: str = "same"
) -> dict[str, dict[str, float]]:
    """phase -> operator -> seconds below which no step of the declared precision can go."""
    found = bounds(config, dtype, ceilings, work, precision)
    return {phase: {op: bound.seconds for op, bound in operators.items()} for phase, operators in found.items()}
