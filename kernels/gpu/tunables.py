"""Parameter values of a Triton launch, from the operators' `params.json`. Needs neither torch nor triton."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from kernels import registry


def resolve(name: str, values: Mapping[str, int] | None = None) -> dict[str, int]:
    """Defaults with `values` over them. Raises ParameterError naming the parameter and what is allowed."""
    return _resolved(name, tuple(sorted((values or {}).items())))


@cache
def _resolved(name: str, values: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Every launch asks, so each set of values is checked once."""
    return registry.load(name, "triton").resolve(dict(values))
