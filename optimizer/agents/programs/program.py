"""A program: which parts are put into the baseline, with which settings and kernel parameters. Its name says all of it.

    packed_linear + fused_qkv
    whole_step (PM_SPIN=1000, policy=prefill_first)
    triton (paged_decode_attention.SPLITS=4, weights=fp8)

so that whoever reads a candidate's name (a person, or an agent after a resume) knows the program.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.artifacts import baseline_files
from kernels import registry
from kernels.gpu import tunables
from kernels.precision import lowest
from optimizer.agents.programs.edit import Part, parts, put_in

TITLES = {
    "llama": "Llama",
    "grouped": "grouped-query",
    "latent": "latent-attention",
}  # of the baselines that parts edit
IMPORTS = "import torch\n"
PARAMETER = re.compile(r"(?:PM_|\w+\.)[A-Z0-9_]+")  # a macro of C++ sources; a key of one Triton operator's values


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
    def device(self) -> str:
        return "cuda" if any(p.device == "cuda" for p in self.chosen) else "cpu"

    @property
    def operators(self) -> list[registry.Op]:
        """Those whose parameters it may set."""
        if self.device == "cuda":
            return [registry.load(name, "triton") for name in tunables.in_step(self.weights)]
        return [registry.load(name) for name in self.kernels]

    @property
    def weights(self) -> str:
        """How a program for a GPU keeps the layers' matrices, one of `tunables.KINDS`."""
        return self.settings.get("weights", "same")

    @property
    def settings(self) -> dict[str, Any]:
        """What is no operator's parameter: names and plain values."""
        return {k: v for k, v in self.values if not PARAMETER.fullmatch(k)}

    @property
    def parameters(self) -> dict[str, int]:
        return {k: v for k, v in self.values if PARAMETER.fullmatch(k)}

    @property
    def manifest_settings(self) -> dict[str, Any]:
        """The settings that its manifest carries. C++ parameters stand in the source; Triton's come with the settings."""
        if self.device == "cpu":
            return self.settings
        chosen = {op.name: values for op in self.operators if (values := self.values_of(op))}
        return self.settings | ({"triton": chosen} if chosen else {})

    @property
    def precision(self) -> str:
        """`same` as the endpoint's, or the lowest that its settings or its operators' parameters ask for."""
        return lowest([*(op.precision(self.values_of(op)) for op in self.operators), self.weights])

    @property
    def mechanism(self) -> str:
        kinds = {p.mechanism for p in self.chosen}
        return next((kind for kind in ("triton", "cpp", "compile", "python") if kind in kinds), "settings")

    def fits(self, *names: str) -> bool:
        """Whether these parts can be put in beside those that are there."""
        try:
            Program.of([*self.parts, *names])
        except ProgramError:
            return False
        return True

    def plus(self, *names: str, **values: Any) -> Program:
        changed = {**dict(self.values), **values}
        return Program.of([*self.parts, *names], **changed) if names else Program(self.parts, tuple(sorted(changed.items())))

    def files(self, baseline: str = "llama") -> dict[str, str]:
        """The sources of `baseline` with the parts in them, and a .cpp for each kernel.

        Raises EditError, registry.ParameterError, and ProgramError for a part on a baseline that it does not edit.
        """
        for part in self.chosen:
            if baseline not in part.baselines:
                raise ProgramError(
                    f"{part.name} edits {' and '.join(sorted(part.baselines))}, not the {baseline} baseline"
                )
        files = put_in(baseline_files(baseline), self.chosen)
        if self.device == "cuda":  # a program of its own, which says itself what it is
            self._check_parameters()
            return files
        for op in self.operators:
            files = paste(files, op.glue_text)
        files["forward.py"] = introduce(files["forward.py"], self.chosen, TITLES[baseline])
        return files | {f"{op.name}.cpp": registry.instantiate(op, self.values_of(op)) for op in self.operators}

    def key(self, op: registry.Op, parameter: str) -> str:
        """The name in `values` of an operator's parameter. Triton operators share names, so theirs begin with the operator."""
        return f"{op.name}.{parameter}" if self.device == "cuda" else parameter

    def values_of(self, op: registry.Op) -> dict[str, int]:
        """The operator's parameters that this program sets."""
        set_here = self.parameters
        return {p.name: set_here[key] for p in op.params if (key := self.key(op, p.name)) in set_here}

    def _check_parameters(self) -> None:
        """Raises registry.ParameterError for a value, ProgramError for a parameter that no launch of the step reads."""
        read = {self.key(op, name) for op in self.operators for name in op.resolve(self.values_of(op))}
        if unread := sorted(set(self.parameters) - read):
            raise ProgramError(
                f"{self.name}: {unread[0]} is not a parameter of a step with weights kept as {self.weights}"
            )


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


def introduce(text: str, chosen: Iterable[Part], title: str) -> str:
    """`text` with a docstring, in place of the one it may have, that says what was put in."""
    titles = [textwrap.fill(f"- {p.title}", 116, subsequent_indent="  ") for p in chosen]
    if not titles:
        return text
    first = ast.parse(text).body[0]
    if isinstance(first, ast.Expr):
        text = "\n".join(text.splitlines()[first.end_lineno :]).lstrip("\n") + "\n"
    head = f'"""A {title} forward pass over a paged KV cache: the baseline with\n\n'
    return head + "\n".join(titles) + '\n"""\n\n' + text


def paste(files: Mapping[str, str], glue: str) -> dict[str, str]:
    """The sources with a kernel's calling code in the one that names the last class of it."""
    tree = ast.parse(glue)
    called = [n.name for n in tree.body if isinstance(n, ast.ClassDef)][-1]
    return {file: pasted(text, glue, tree) if f"{called}(" in text else text for file, text in files.items()}


def pasted(text: str, glue: str, tree: ast.Module) -> str:
    """`text` with the code of `glue` before its first class or constant, and the imports that it needs."""
    imports = [n for n in tree.body if isinstance(n, ast.Import)]
    first = next(n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom | ast.Expr))
    code = "\n".join(glue.splitlines()[first.lineno - 1 :])
    names = sorted(alias.name for n in imports for alias in n.names if alias.name != "torch")
    lines = [f"import {name}" for name in names if f"import {name}\n" not in text]
    text = text.replace(IMPORTS, "".join(f"{line}\n" for line in lines) + ("\n" if lines else "") + IMPORTS, 1)
    end = text.index("rope_table\n") + len("rope_table\n") if "rope_table\n" in text else text.index("\n\n\n") + 1
    return f"{text[:end]}\n\n{code}\n{text[end:]}"
