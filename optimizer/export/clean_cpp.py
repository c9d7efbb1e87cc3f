"""A kernel's C++ text without the branches that its own parameters rule out, and without parameters that nothing reads.

Parameters are macros whose names begin with PM_. One that the text nowhere defines is undefined: candidates are compiled
without -D. Conditions on anything else (the processor, the system) stay, so that the text still builds elsewhere.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

DIRECTIVE = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", re.DOTALL)
DEFINE = re.compile(r"\s*#\s*define\s+(PM_\w+)(\(?)(.*)", re.DOTALL)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


class CleanError(ValueError):
    """The text's conditions do not close."""


class Unknown(Exception):
    """Only the compiler can tell."""


@dataclass
class Chain:
    """An #if with its branches: (condition, what stands inside), the condition of #else being 1."""

    branches: list[tuple[str, list[str | Chain]]]


def clean_cpp(text: str) -> str:
    """Raises CleanError for conditions that do not close. The compiler sees the same tokens as before."""
    nodes = list(parse(logical_lines(text)))
    if any(isinstance(node, str) and DIRECTIVE.match(node) for node in nodes):
        raise CleanError("an #else or #endif has no #if")
    kept = without_unread(Resolver().resolve(nodes, certain=True))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n") + "\n"


def logical_lines(text: str) -> Iterator[str]:
    """Lines, each with those that a backslash joins to it."""
    held: list[str] = []
    for line in text.splitlines():
        held.append(line)
        if not line.endswith("\\"):
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def parse(lines: Iterator[str]) -> Iterator[str | Chain]:
    """Nodes up to the end of `lines`, or up to a directive that belongs to the chain around, which is given last."""
    for line in lines:
        found = DIRECTIVE.match(line)
        kind = found[1] if found else ""
        if kind in ("if", "ifdef", "ifndef"):
            yield chain(condition(line), lines)
        else:
            yield line
            if kind:
                return


def chain(first: str, lines: Iterator[str]) -> Chain:
    found = Chain([])
    while True:
        *inside, last = list(parse(lines)) or [""]
        ends = isinstance(last, str) and DIRECTIVE.match(last)
        if not ends:
            raise CleanError("an #if has no #endif")
        found.branches.append((first, inside))
        if ends[1] == "endif":
            return found
        first = condition(last)


def condition(line: str) -> str:
    kind, rest = DIRECTIVE.match(line).groups()  # type: ignore[union-attr]
    rest = COMMENT.sub("", rest).replace("\\\n", " ").strip()
    return {"ifdef": f"defined({rest})", "ifndef": f"!defined({rest})", "else": "1"}.get(kind, rest)


@dataclass
class Resolver:
    """What is known of the macros while the text is read. A value of None: defined perhaps, or to more than a number."""

    values: dict[str, int | None] = field(default_factory=dict)

    def resolve(self, nodes: list[str | Chain], *, certain: bool) -> list[str]:
        """`certain`: these lines are compiled for sure, so that what they define is known."""
        out: list[str] = []
        for node in nodes:
            if isinstance(node, Chain):
                out += self.branches(node, certain)
            else:
                self.define(node, certain)
                out.append(node)
        return out

    def define(self, line: str, certain: bool) -> None:
        if found := DEFINE.match(line):
            value = COMMENT.sub("", found[3]).strip()
            number = certain and not found[2] and re.fullmatch(r"-?\d+", value)
            self.values[found[1]] = int(value) if number else None

    def branches(self, node: Chain, certain: bool) -> list[str]:
        possible = []
        for text, inside in node.branches:
            truth = self.truth(text)
            if truth is not False:
                possible.append((text if truth is None else "1", inside))
            if truth:
                break
        if possible and possible[0][0] == "1":
            return self.resolve(possible[0][1], certain=certain)
        out = []
        for i, (text, inside) in enumerate(possible):
            out.append("#else" if text == "1" else f"#{'el' if i else ''}if {text}")
            out += self.resolve(inside, certain=False)
        return [*out, "#endif"] if out else []

    def truth(self, text: str) -> bool | None:
        """What is known of a condition, None when only the compiler can tell."""
        python = re.sub(r"defined\s*\(\s*(\w+)\s*\)|defined\s+(\w+)", r"defined_\1\2", text)
        python = re.sub(r"!(?!=)", " not ", python.replace("&&", " and ").replace("||", " or "))
        try:
            return bool(self.value(ast.parse(python.strip(), mode="eval").body))
        except (SyntaxError, Unknown):
            return None

    def value(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name):
                return self.macro(name)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand)
            case ast.BoolOp(op=op, values=values):
                return self.several(values, isinstance(op, ast.And))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                return COMPARE[type(op)](self.value(left), self.value(right))
        raise Unknown

    def several(self, nodes: list[ast.expr], every: bool) -> bool:
        """`and` or `or`: settled by one known value, whatever the unknown ones are."""
        unknown = False
        for node in nodes:
            try:
                if bool(self.value(node)) is not every:
                    return not every
            except Unknown:
                unknown = True
        if unknown:
            raise Unknown
        return every

    def macro(self, name: str) -> int:
        asked = name.removeprefix("defined_")
        if not asked.startswith("PM_"):
            raise Unknown
        if asked not in self.values:
            return 0
        value = self.values[asked]
        if value is None:
            raise Unknown
        return value if asked == name else 1


def without_unread(lines: list[str]) -> list[str]:
    """Without one-line definitions of parameters that no other line names, until none is left."""
    while True:
        named = [set(re.findall(r"\bPM_\w+", COMMENT.sub("", line))) for line in lines]
        count: dict[str, int] = {}
        for names in named:
            for name in names:
                count[name] = count.get(name, 0) + 1
        kept = [line for line in lines if not ((d := DEFINE.match(line)) and "\n" not in line and count[d[1]] == 1)]
        if len(kept) == len(lines):
            return lines
        lines = kept
