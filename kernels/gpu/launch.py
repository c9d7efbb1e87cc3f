"""The one place where a Triton kernel is launched, so that a dispatch report counts launches and nothing else.

An operator's calling code runs unchanged in two other ways: under Triton's interpreter (TRITON_INTERPRET=1, CPU tensors) and
under `recording`, where nothing runs and every launch is kept for ahead-of-time compilation (meta tensors will do).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, ...]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that was asked for: positional arguments, constexpr values by name, compiler options."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(slots=True)
class _State:
    """Steps run one at a time in a process, so one counter and one record are enough."""

    counts: Counter[str] | None = None
    record: list[Launch] | None = None


_state = _State()


def launch(kernel: Any, grid: Grid, *args: Any, **named: Any) -> None:
    """`kernel[grid](*args, **named)`, counted. `named` holds constexprs and compiler options. An empty grid does nothing.

    Multiply-adds are fused by name: Triton's own default differs between its versions.
    """
    if 0 in grid:
        return
    named.setdefault("enable_fp_fusion", True)
    if _state.counts is not None:
        _state.counts[kernel.__name__] += 1
    if _state.record is None:
        kernel[grid](*args, **named)
        return
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    _state.record.append(Launch(kernel, args, named, options))


@contextmanager
def counting(into: Counter[str]) -> Iterator[None]:
    """Adds each launch of the block to `into`, by the kernel's name."""
    before, _state.counts = _state.counts, into
    try:
        yield
    finally:
        _state.counts = before


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Keeps the launches of the block instead of running them."""
    before, _state.record = _state.record, []
    try:
        yield _state.record
    finally:
        _state.record = before


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")  # as Triton reads it


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def precision(x: Tensor) -> str:
    """How `dot.dot` multiplies this dtype: float32 exactly (TF32 would lose 13 bits), others on tensor cores as they are.

    The interpreter widens all to float32 first: its own products of bf16 multiply the bits as whole numbers.
    """
    return "ieee" if x.dtype == torch.float32 or interpreted() else "tf32"
