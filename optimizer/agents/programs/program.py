"""A program: which parts are put into the baseline, with which settings and kernel parameters. Its name says all of it.

    packed_linear + fused_qkv
    whole_step (PM_SPIN=1000, policy=prefill_first)

so that whoever reads a candidate's name (a person, or an agent after a resume) knows the program.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
from engine.artifacts import baseline_files
from kernels import registry
from kernels.precision import lowest
from optimizer.agents.programs.edit import Part, parts, put_in

BASELINE = Path(engine.__file__).parent / "baseline" / "forward.py"  # the source that parts edit: Llama's
IMPORTS = "import torch\n"
KERNEL_PARAMETER = re.compile(r"PM_[A-Z0-9_]+")


class ProgramError(ValueError):
    """Parts that do not fit together, or a name that is not a program's."""


@dataclass(frozen=True, slots=True)
class Program:
    """`parts` in the order of the catalogue; `values` sorted. Two equal programs are the same candidate."""

    parts: tuple[str, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, names: Iterable[str] = (), **values: Any) -> Program:
        """With what the parts need. Raises ProgramError for an unknown part or for two that rewrite the same region."""
        wanted = with_needs(names)
        taken: dict[str, str] = {}
        for part in wanted:
            for slot in part.slots:
                if slot in taken:
                    raise ProgramError(f"{part.name} and {taken[slot]} both rewrite {slot}")
                taken[slot] = part.name
        return cls(tuple(p.name for p in wanted), tuple(sorted(values.items())))

    @classmethod
    def parse(cls, name: str) -> Program:
        """The program that `name` spells. Raises ProgramError."""
        spelled, _, inside = name.partition(" (")
        values = dict(item.split("=", 1) for item in inside.rstrip(")").split(", ") if "=" in item)
        return cls.of(
            [] if spelled == "baseline" else spelled.split(" + "),
            **{k: int(v) if re.fullmatch(r"-?\d+", v) else v for k, v in values.items()},
        )

    @property
    def name(self) -> str:
        spelled = " + ".join(self.parts) or "baseline"
        return f"{spelled} ({', '.join(f'{k}={v}' for k, v in self.values)})" if self.values else spelled

    @property
    def chosen(self) -> list[Part]:
        return [parts()[name] for name in self.parts]

    @property
    def kernels(self) -> list[str]:
        return [p.kernel for p in self.chosen if p.kernel]

    @property
    def settings(self) -> dict[str, Any]:
        return {k: v for k, v in self.values if not KERNEL_PARAMETER.fullmatch(k)}

    @property
    def parameters(self) -> dict[str, int]:
        return {k: v for k, v in self.values if KERNEL_PARAMETER.fullmatch(k)}

    @property
    def precision(self) -> str:
        """`same` as the endpoint's, or the lowest that the kernels' parameters ask for."""
        return lowest(registry.load(kernel).precision(self._parameters_of(kernel)) for kernel in self.kernels)

    @property
    def mechanism(self) -> str:
        kinds = {p.mechanism for p in self.chosen}
        return next((kind for kind in ("cpp", "compile", "python") if kind in kinds), "settings")

    def fits(self, *names: str) -> bool:
        """Whether these parts can be put in beside those that are there."""
        try:
            Program.of([*self.parts, *names])
        except ProgramError:
            return False
        return True

    def plus(self, *names: str, **values: Any) -> Program:
        return Program.of([*self.parts, *names], **{**dict(self.values), **values})

    def files(self, baseline: str = "llama") -> dict[str, str]:
        """`forward.py` and a .cpp for each kernel; without parts, the sources of the model's own `baseline`.

        Raises EditError, registry.ParameterError, and ProgramError for parts on a baseline that they do not edit.
        """
        if baseline != "llama":
            if self.parts:
                raise ProgramError(f"{self.name} edits the Llama baseline, not the {baseline} one")
            return baseline_files(baseline)
        sources = {f"{name}.cpp": registry.instantiate(name, self._parameters_of(name)) for name in self.kernels}
        return {"forward.py": self.forward(), **sources}

    def forward(self) -> str:
        text = put_in(BASELINE.read_text(), self.chosen)
        for kernel in self.kernels:
            text = paste(text, registry.load(kernel).glue_text)
        return introduce(text, self.chosen)

    def _parameters_of(self, kernel: str) -> dict[str, int]:
        known = registry.load(kernel).defaults()
        return {k: v for k, v in self.parameters.items() if k in known}


def with_needs(names: Iterable[str]) -> list[Part]:
    """The parts named and those they need, in the catalogue's order."""
    catalogue, wanted, queue = parts(), set(), list(names)
    while queue:
        name = queue.pop()
        if name not in catalogue:
            raise ProgramError(f"there is no part {name!r}: there are {', '.join(catalogue)}")
        if name not in wanted:
            wanted.add(name)
            queue.extend(catalogue[name].needs)
    return [part for name, part in catalogue.items() if name in wanted]


def introduce(text: str, chosen: Iterable[Part]) -> str:
    """`text` with a docstring, in place of the one it may have, that says what was put in."""
    titles = [textwrap.fill(f"- {p.title}", 116, subsequent_indent="  ") for p in chosen]
    if not titles:
        return text
    first = ast.parse(text).body[0]
    if isinstance(first, ast.Expr):
        text = "\n".join(text.splitlines()[first.end_lineno :]).lstrip("\n") + "\n"
    head = '"""A Llama forward pass over a paged KV cache: the baseline with\n\n'
    return head + "\n".join(titles) + '\n"""\n\n' + text


def paste(text: str, glue: str) -> str:
    """`text` with a kernel's calling code before its first class or constant, and the imports that it needs."""
    tree = ast.parse(glue)
    imports = [n for n in tree.body if isinstance(n, ast.Import)]
    first = next(n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom | ast.Expr))
    code = "\n".join(glue.splitlines()[first.lineno - 1 :])
    names = sorted(alias.name for n in imports for alias in n.names if alias.name != "torch")
    lines = [f"import {name}" for name in names if f"import {name}\n" not in text]
    text = text.replace(IMPORTS, "".join(f"{line}\n" for line in lines) + ("\n" if lines else "") + IMPORTS, 1)
    end = text.index("rope_table\n") + len("rope_table\n") if "rope_table\n" in text else text.index("\n\n\n") + 1
    return f"{text[:end]}\n\n{code}\n{text[end:]}"
