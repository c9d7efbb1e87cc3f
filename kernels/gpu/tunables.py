"""What may be chosen of the Triton step: how its weights are kept, and parameter values of a launch from the operators'
`params.json`. Needs neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from kernels import registry

KINDS = ("same", "fp8", "int8", "int4")  # how the layers' matrices may be kept
KERNEL = {"same": "small_m_matmul", "fp8": "fp8_matmul", "int8": "weight_only_matmul", "int4": "weight_only_matmul"}
CAPABILITY = {"same": (8, 0), "fp8": (9, 0), "int8": (8, 0), "int4": (8, 0)}  # the least compute capability for each
INT4_GROUPS = (128, 64, 32)  # columns that share a scale: the first that divides a weight's depth
AROUND = ("lm_head", "paged_decode_attention", "prefill_attention", "qkv_rope_kv", "rmsnorm_residual")


def in_step(kind: str) -> tuple[str, ...]:
    """The operators that a dense model's step launches with weights of this kind: those whose parameters count."""
    return tuple(sorted({*AROUND, KERNEL[kind], *(("gated_mlp",) if kind == "same" else ())}))


def resolve(name: str, values: Mapping[str, int] | None = None) -> dict[str, int]:
    """Defaults with `values` over them. Raises ParameterError naming the parameter and what is allowed."""
    return _resolved(name, tuple(sorted((values or {}).items())))


@cache
def _resolved(name: str, values: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Every launch asks, so each set of values is checked once."""
    return registry.load(name, "triton").resolve(dict(values))
