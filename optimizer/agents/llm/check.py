"""What is looked at in a model's program before it is proposed, so that a slip costs no build and no host.

It keeps nobody in: a program that means harm passes here and meets the sandbox.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from engine.artifacts import ArtifactError, check_files, source_hash
from engine.scheduler import SchedulerConfig

MODULES = frozenset(
    {
        "__future__", "collections", "contextlib", "ctypes", "dataclasses", "enum", "functools", "itertools", "math",
        "numpy", "operator", "torch", "typing",
    }
)  # fmt: skip
CONTRACT = "engine.contract"
NOT_CALLED = frozenset(
    {"eval", "exec", "compile", "open", "input", "__import__", "breakpoint", "exit", "quit", "globals"}
)
KNOBS = tuple(SchedulerConfig.__slots__)
LARGEST_BLOCK = 512
DEEPEST = 100  # levels of a syntax tree


class AnswerError(Exception):
    """The answer gives no program that may be tried; the text is told to the model. `kind` is counted in the report."""

    def __init__(self, text: str, kind: str = "malformed") -> None:
        super().__init__(text)
        self.kind = kind


def check_program(
    files: Mapping[str, str],
    settings: Mapping[str, Any],
    *,
    known_settings: frozenset[str],
    compiler: bool,
    known_modules: frozenset[str] = frozenset(),
) -> str:
    """The program's source hash. Raises AnswerError for one that could not be built or loaded here.

    What the edited program had may stay: `known_settings`, and `known_modules` that it imports.
    """
    try:
        check_files(files)
    except ArtifactError as error:
        raise AnswerError(str(error)) from None
    for name, text in sorted(files.items()):
        if name.endswith(".py"):
            _check_python(name, text, files, known_modules)
        elif name.endswith(".cpp"):
            _check_cpp(name, text, compiler)
        else:
            raise AnswerError(f"{name}: put what it holds into the .cpp file, which is compiled by itself.")
    if not compiler and any("torch.compile" in text for text in files.values()):
        raise AnswerError("torch.compile needs a C++ compiler and this machine has none.")
    _check_build(files["forward.py"])
    check_settings(settings, known_settings)
    return source_hash(files, settings)


def check_settings(settings: Mapping[str, Any], known: frozenset[str] = frozenset()) -> None:
    """The scheduler's knobs, `block_size`, and what the edited program had. Raises AnswerError."""
    unknown = sorted(set(settings) - set(KNOBS) - known - {"block_size"})
    if unknown:
        names = ", ".join(("block_size", *KNOBS))
        raise AnswerError(
            f"The engine knows no setting {unknown[0]!r}: it knows {names}. Write others into the source."
        )
    for name, value in settings.items():
        if not isinstance(value, int | float | str):
            raise AnswerError(f"The setting {name} is {str(value)[:40]}: give a number or a word.")
    size = settings.get("block_size", 16)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST_BLOCK:
        raise AnswerError(f"block_size is {size!r}: give a whole number of tokens from 1 to {LARGEST_BLOCK}.")
    try:
        SchedulerConfig.from_settings(settings)
    except (ValueError, TypeError) as error:
        raise AnswerError(f"The scheduler refuses the settings: {error}.") from None


def modules_of(files: Mapping[str, str]) -> frozenset[str]:
    """Modules that the Python files import, relative ones with their dots."""
    trees = (ast.parse(text) for name, text in files.items() if name.endswith(".py"))
    return frozenset(module for tree in trees for node in ast.walk(tree) for module in _imported(node))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []


def _check_python(name: str, text: str, files: Mapping[str, str], known: frozenset[str]) -> None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}: {error.text or ''}" if isinstance(error, SyntaxError) else ""
        raise AnswerError(f"{name} is no Python: {error}{where}".rstrip()) from None
    if _depth(tree) > DEEPEST:
        raise AnswerError(f"{name} has an expression that is nested too deeply.")
    for node in ast.walk(tree):
        for module in _imported(node):
            if module not in known:
                _check_import(name, module, files)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NOT_CALLED:
            raise AnswerError(f"{name} calls {node.func.id}(): a candidate may not.")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "library":
            _check_library(name, node, files)


def _depth(tree: ast.AST) -> int:
    """Levels of the tree. What walks it by recursion later must not run out of stack."""
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def _check_import(name: str, module: str, files: Mapping[str, str]) -> None:
    own = module.startswith(".") and (module == "." or f"{module[1:]}.py" in files)
    if not (own or module == CONTRACT or module.split(".")[0] in MODULES):
        allowed = f"{', '.join(sorted(MODULES))}, {CONTRACT} and its own files"
        raise AnswerError(f"{name} imports {module}: a candidate may import {allowed}.")


def _check_library(name: str, call: ast.Call, files: Mapping[str, str]) -> None:
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str) and f"{first.value}.cpp" not in files:
        raise AnswerError(
            f"{name} asks for the library {first.value!r} and there is no {first.value}.cpp among the files."
        )


def _check_cpp(name: str, text: str, compiler: bool) -> None:
    if not compiler:
        raise AnswerError(f"{name}: this machine has no C++ compiler. Write it in Python.")
    found = re.search(r'^\s*#\s*include\s*"([^"]*)"', text, re.M)
    if found:
        raise AnswerError(
            f"{name} includes {found[1]!r}: a kernel is one file and may include the system's headers only."
        )
    if 'extern "C"' not in text:
        raise AnswerError(f'{name} exports nothing: declare what Python calls as extern "C".')


def _check_build(text: str) -> None:
    tree = ast.parse(text)
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build"]
    if not found or len(found[-1].args.args) != 2:
        raise AnswerError("forward.py does not define build(model, settings).")
