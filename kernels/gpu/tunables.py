"""Tunable parameters of the Triton operators, as data: `kernels/<op>/triton_params.json`. Needs neither torch nor triton."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from kernels.registry import ROOT, Op, Parameter


def names() -> list[str]:
    """Every operator that has a Triton source."""
    return sorted(p.parent.name for p in ROOT.glob("*/triton_params.json"))


@cache
def load(name: str) -> Op:
    """The operator with its Triton source. Raises KeyError with the known names for one that does not exist."""
    folder = ROOT / name
    if not (folder / "triton_params.json").exists():
        raise KeyError(f"no Triton operator {name!r}: there are {', '.join(names())}")
    rows = json.loads((folder / "triton_params.json").read_text())
    params = tuple(
        Parameter(r["name"], tuple(r["values"]), r["default"], r.get("constraint", ""), r["why"]) for r in rows
    )
    return Op(name, folder, (folder / "triton.py").read_text(), "", params)


def resolve(name: str, values: Mapping[str, int] | None = None) -> dict[str, int]:
    """Defaults with `values` over them. Raises ParameterError naming the parameter and what is allowed."""
    return _resolved(name, tuple(sorted((values or {}).items())))


@cache
def _resolved(name: str, values: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Every launch asks, so each set of values is checked once."""
    return load(name).resolve(dict(values))
