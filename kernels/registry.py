"""Operators as data: sources, tunable parameters, reference and calling code of each. Torch-free.

An operator is a folder: `reference.py` says what is right, `params.json` what may be varied, and `cpu.cpp` (with `glue.py`, which
calls it), `triton.py` or both compute it. A parameter belongs to the C++ source unless it says `"for": "triton"`.

`instantiate` gives one self-contained C++ text: the parameter values as #defines on top, our own headers written in. Such a
text is what a candidate carries, what a customer reviews and what `kernels.build.compile_cpp` compiles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from kernels.precision import lowest

ROOT = Path(__file__).resolve().parent
SOURCES = {"cpu": "cpu.cpp", "triton": "triton.py"}  # by what an operator may be asked for
LATE = re.compile(r'^extern "C" \{ long (\w+) = (-?\d+); \}.*\n#define \1 \1$', re.MULTILINE)
LOCAL_INCLUDE = re.compile(r'^#include "([^"]+)"\s*$', re.MULTILINE)


class ParameterError(ValueError):
    """A parameter that the operator does not have, or a value that it does not allow."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str  # the macro (cpu) or the key of a launch's values (triton)
    values: tuple[int, ...]
    default: int
    constraint: str  # an expression over parameter names that must hold, or ""
    why: str
    precision: tuple[tuple[int, str], ...] = ()  # (value, name) of those that compute in less than the endpoint's dtype
    late: bool = False  # cpu: read at run time, so that another value needs no new compilation


@dataclass(frozen=True, slots=True)
class Op:
    """One source of an operator and the parameters that it reads."""

    name: str
    folder: Path
    source_text: str  # cpu.cpp with our headers written in, or triton.py
    glue_text: str  # Python that binds and calls the library: pasted into a candidate's forward.py; "" for triton
    params: tuple[Parameter, ...]

    def defaults(self) -> dict[str, int]:
        return {p.name: p.default for p in self.params}

    def resolve(self, values: Mapping[str, int] | None = None) -> dict[str, int]:
        """Defaults with `values` over them. Raises ParameterError naming the parameter and what is allowed."""
        known = {p.name: p for p in self.params}
        for name, value in (values or {}).items():
            if name not in known:
                raise ParameterError(f"{self.name} has no parameter {name}: it has {', '.join(known)}")
            if value not in known[name].values:
                raise ParameterError(
                    f"{name} cannot be {value}: it is one of {', '.join(map(str, known[name].values))}"
                )
        resolved = {**self.defaults(), **(values or {})}
        for p in self.params:
            if p.constraint and not holds(p.constraint, resolved):
                raise ParameterError(f"{self.name} needs {p.constraint}, not {resolved}")
        return resolved

    def precision(self, values: Mapping[str, int] | None = None) -> str:
        """What the operator computes in with these values: `same` as the endpoint, or the name of a lower precision."""
        resolved = self.resolve(values)
        named = (dict(p.precision).get(resolved[p.name]) for p in self.params)
        return lowest(name for name in named if name)

    def allows(self, values: Mapping[str, int]) -> bool:
        try:
            self.resolve(values)
        except ParameterError:
            return False
        return True


def holds(constraint: str, values: Mapping[str, int]) -> bool:
    """Whether a constraint of params.json (our own data, arithmetic over names) is true of `values`."""
    return bool(eval(compiled(constraint), {"__builtins__": {}}, dict(values)))


@cache
def compiled(constraint: str) -> CodeType:
    return compile(constraint, "constraint", "eval")


def names(source: str = "cpu") -> list[str]:
    """The operators that have this source, a key of SOURCES."""
    return sorted(p.parent.name for p in ROOT.glob(f"*/{SOURCES[source]}") if (p.parent / "params.json").exists())


@cache
def load(name: str, source: str = "cpu") -> Op:
    """Raises KeyError with the known names for an operator that does not exist or has no such source."""
    if name not in names(source):
        raise KeyError(f"no {source} operator {name!r}: there are {', '.join(names(source))}")
    folder = ROOT / name
    params = tuple(parameter(r) for r in rows(folder) if r.get("for", "cpu") == source)
    if source == "triton":
        return Op(name, folder, (folder / "triton.py").read_text(), "", params)
    return Op(name, folder, inlined(folder / "cpu.cpp"), (folder / "glue.py").read_text(), params)


def rows(folder: Path) -> list[dict[str, Any]]:
    """An operator's parameters as they are written, of all its sources."""
    return json.loads((folder / "params.json").read_text())


def parameter(row: Mapping[str, Any]) -> Parameter:
    precision = tuple((int(value), name) for value, name in row.get("precision", {}).items())
    values = tuple(row["values"])
    late = row.get("read") == "run"
    return Parameter(row["name"], values, row["default"], row.get("constraint", ""), row["why"], precision, late)


def instantiate(op: Op | str, values: Mapping[str, int] | None = None) -> str:
    """The operator's whole source with its parameters at the top: as #defines, or as values that are read at run time
    (`kernels.build` compiles what follows once for all of those). Raises ParameterError.
    """
    op = load(op) if isinstance(op, str) else op
    late = {p.name for p in op.params if p.late}
    lines = [
        f'extern "C" {{ long {name} = {value}; }}  // read at run time\n#define {name} {name}\n'
        if name in late
        else f"#define {name} {value}\n"
        for name, value in op.resolve(values).items()
    ]
    return f"// {op.name}: parameters\n{''.join(lines)}\n{op.source_text}"


def inlined(path: Path, seen: set[Path] | None = None) -> str:
    """A source with our own headers written in, each once."""
    seen = set() if seen is None else seen
    path = path.resolve()
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text().replace("#pragma once\n", "")
    return LOCAL_INCLUDE.sub(lambda match: inlined(path.parent / match[1], seen).rstrip("\n"), text)


def settled(text: str) -> str:
    """A text of `instantiate` whose values are settled: what was read at run time is a #define like the others."""
    return LATE.sub(r"#define \1 \2", text)
