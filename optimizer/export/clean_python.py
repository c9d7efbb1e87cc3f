"""A candidate's Python without what can never run, and with names for the numbers it is tuned with.

Out goes what stands behind a return or on the untaken side of a constant condition, and every import, function, class and
method whose name no file of the candidate says. A tuning number (the default of a setting, a keyword argument) becomes
a constant of the module. Lines that stay keep their text, comments included.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath

ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
CONTRACT = frozenset({"build", "allocate"})  # what the engine calls by name
PLAIN = frozenset({0, 1, 2, -1, 0.5})  # numbers that a name would not make clearer
Span = tuple[int, int]  # first and last line, from 1


def clean_python(files: Mapping[str, str]) -> dict[str, str]:
    """The Python of `files`, cleaned; other files as they are. Raises SyntaxError for what is not Python."""
    texts = {name: text for name, text in files.items() if name.endswith(".py")}
    own = {PurePath(name).stem for name in texts}
    while True:
        used = sum((names_used(text) for text in texts.values()), Counter())
        shared = sum((names_imported(text, own) for text in texts.values()), Counter())
        cleaned = {n: without_unsaid(settled(without(t, unreachable(t))), used, shared) for n, t in texts.items()}
        if cleaned == texts:
            return {**files, **{name: named_numbers(text) for name, text in texts.items()}}
        texts = cleaned


# what never runs


def unreachable(text: str) -> list[Span]:
    """Lines behind a return, raise, continue or break of the same block."""
    spans = []
    for node in ast.walk(ast.parse(text)):
        for body in blocks(node):
            ends = next((i for i, s in enumerate(body) if isinstance(s, ENDS)), len(body))
            spans += [span(s) for s in body[ends + 1 :]]
    return spans


def settled(text: str) -> str:
    """`text` with every `if` on a constant replaced by the side that is taken."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Constant):
            taken = node.body if node.test.value else node.orelse
            lines = text.splitlines()
            first, last = span(node)
            here = " " * node.col_offset
            inside = lines[taken[0].lineno - 1 : taken[-1].end_lineno] if taken else ["pass"]
            inside = textwrap.indent(textwrap.dedent("\n".join(inside)), here).splitlines()
            inside[0] = re.sub(r"^(\s*)elif\b", r"\1if", inside[0])
            return settled("\n".join([*lines[: first - 1], *inside, *lines[last:]]) + "\n")
    return text


# what nobody names


def without_unsaid(text: str, used: Mapping[str, int], shared: Mapping[str, int]) -> str:
    """Without imports and definitions that nothing names; `shared`: names that files of the candidate import."""
    tree, spans = ast.parse(text), []
    for node in tree.body:
        if isinstance(node, IMPORTS) and not any(used.get(bound(alias)) for alias in node.names):
            spans.append(span(node))
    for node in ast.walk(tree):
        for body in blocks(node):
            named = [s for s in body if isinstance(s, DEFINITIONS) and not s.name.startswith("__")]
            spans += [
                span(s) for s in named if s.name not in CONTRACT and not used.get(s.name) and not shared.get(s.name)
            ]
    return narrowed(without(text, spans), used)


def narrowed(text: str, used: Mapping[str, int]) -> str:
    """Imports of one line without the names that nothing uses."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.lineno == node.end_lineno:
            kept = [alias for alias in node.names if used.get(bound(alias))]
            if kept and len(kept) < len(node.names):
                lines[node.lineno - 1] = ast.unparse(ast.ImportFrom(node.module, kept, node.level))
    return "\n".join(lines) + "\n"


def names_used(text: str) -> Counter[str]:
    """How often each name is said: as a name, behind a dot, or as a word of a string (it may be looked up by text)."""
    words: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            words[node.id] += 1
        elif isinstance(node, ast.Attribute):
            words[node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.update(re.findall(r"\w+", node.value))
    return words


def names_imported(text: str, own: Iterable[str]) -> Counter[str]:
    """Names taken from other files of the candidate."""
    found = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and (n.module or "") in own)
    return Counter(alias.name for node in found for alias in node.names)


def bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).split(".")[0]


# numbers


def named_numbers(text: str) -> str:
    """`text` with the tuning numbers of its functions as constants under the imports, each value under its own name."""
    tree = ast.parse(text)
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names: dict[str, float] = {}
    lines = text.splitlines()
    places = {(n.lineno, n.col_offset): (n, hint.upper()) for hint, n in tuning_numbers(tree)}
    for _, (number, name) in sorted(places.items(), reverse=True):  # from the end, so that columns stay right
        if names.get(name, number.value) != number.value or (name in taken and name not in names):
            name += "_" + re.sub(r"\W", "_", str(number.value))
        names[name] = number.value
        line = lines[number.lineno - 1].encode()
        lines[number.lineno - 1] = (line[: number.col_offset] + name.encode() + line[number.end_col_offset :]).decode()
    if not names:
        return text
    behind = max((n.end_lineno or 0 for n in tree.body if isinstance(n, IMPORTS)), default=0)
    lines[behind:behind] = ["", *(f"{name} = {value!r}" for name, value in sorted(names.items()))]
    return "\n".join(lines) + "\n"


def tuning_numbers(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    """(what to call it, the number): defaults of settings and keyword arguments inside functions."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    for call in (n for f in functions for n in ast.walk(f) if isinstance(n, ast.Call)):
        named = [(k.arg, k.value) for k in call.keywords if k.arg not in (None, "dim")]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and len(call.args) == 2:
            key = getattr(call.args[0], "value", None)
            named.append((f"default_{key}", call.args[1]))
        for name, value in named:
            is_number = isinstance(value, ast.Constant) and type(value.value) in (int, float)
            if is_number and value.value not in PLAIN and isinstance(name, str) and name.isidentifier():
                yield name, value


# text


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [body for body in found if isinstance(body, list)]


def span(node: ast.stmt) -> Span:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return first, node.end_lineno or node.lineno


def without(text: str, spans: Iterable[Span]) -> str:
    """`text` without these lines and at most two empty ones in a row; as it was where a block would be left empty."""
    gone = {i for first, last in spans for i in range(first, last + 1)}
    kept = "\n".join(line for i, line in enumerate(text.splitlines(), 1) if i not in gone)
    kept = re.sub(r"\n{4,}", "\n\n\n", kept).strip("\n") + "\n"
    try:
        ast.parse(kept)
    except SyntaxError:
        return text
    return kept
