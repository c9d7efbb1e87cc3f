"""Parts: small edits of the baseline's source, kept as text. A candidate is the baseline with some parts put in.

A part file has a head of `key: value` lines, then hunks. Each hunk names text that stands exactly once in the source
and what it becomes, so a program differs from the baseline by its parts and by nothing else:

    <<<<
    text as it is
    ====
    text as it becomes
    >>>>

A hunk whose new text keeps the old one inserts, and several parts may insert at one place. A hunk without old text
replaces the whole source; a part with `source` has no hunks and replaces it with that file of `engine/`. `drops` names
functions and classes that nothing calls any more.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import engine

ENGINE = Path(engine.__file__).resolve().parent
FOLDER = Path(__file__).resolve().parent / "parts"
HUNK = re.compile(r"^<<<<\n(.*?)^====\n(.*?)^>>>>\n", re.S | re.M)


class EditError(ValueError):
    """A part does not fit the source: it or another part was written for another text."""


@dataclass(frozen=True, slots=True)
class Part:
    """One idea. Two parts fit together when their slots are disjoint and what they need is there.

    `gains` says how many times faster each operator is expected to become, before anything was measured.
    """

    name: str
    title: str
    focus: str
    slots: frozenset[str]  # regions of the forward pass that it rewrites
    hunks: tuple[tuple[str, str], ...]
    why: str  # the hypothesis; {..} takes figures of the run (see agents/words.py)
    gains: Mapping[str, float] = field(default_factory=dict, hash=False)
    mechanism: str = "python"
    kernel: str = ""  # operator of kernels/ whose source and calling code it carries
    needs: frozenset[str] = frozenset()  # parts that must be there too
    drops: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()  # served dtypes it works in; empty: all
    unless: frozenset[str] = frozenset()  # fields of the model's config that it cannot serve when they are set
    device: str = "cpu"  # or cuda: where it computes


def parse(name: str, text: str) -> Part:
    """Raises EditError for a text without hunks or whose head lacks a field."""
    head, mark, body = text.partition("<<<<\n")
    fields = dict(line.split(": ", 1) for line in re.sub(r"\n +", " ", head).strip().splitlines())
    hunks = tuple((m[1][:-1], m[2][:-1]) for m in HUNK.finditer(mark + body))
    if "source" in fields:
        hunks = (("", (ENGINE / fields["source"]).read_text()[:-1]),)
    missing = {"title", "focus", "slots", "why"} - fields.keys()
    if missing or not hunks:
        raise EditError(f"part {name} lacks {', '.join(sorted(missing)) or 'hunks'}")
    gains = {k: float(v) for k, v in (pair.split("=") for pair in fields.get("gains", "").split())}
    sets = {key: frozenset(fields.get(key, "").split()) for key in ("slots", "needs", "drops", "dtypes", "unless")}
    texts = {key: fields[key] for key in ("title", "focus", "why", "mechanism", "kernel", "device") if key in fields}
    return Part(name=name, hunks=hunks, gains=gains, **texts, **sets)


@cache
def parts() -> dict[str, Part]:
    """All parts by name. A part stands after those it needs, so that this is also an order to put them in."""
    read = {p.stem: parse(p.stem, p.read_text()) for p in sorted(FOLDER.glob("*.edit"))}
    return dict(sorted(read.items(), key=lambda item: (len(item[1].needs), item[0])))


def put_in(text: str, chosen: Sequence[Part]) -> str:
    """`text` with the parts' hunks; a hunk that several parts share is put in once.

    Raises EditError naming the part and the text that does not stand exactly once.
    """
    done: set[tuple[str, str]] = set()
    for part in chosen:
        for old, new in part.hunks:
            if (old, new) in done:
                continue
            if old and text.count(old) != 1:
                found = text.count(old)
                raise EditError(f"part {part.name} looks for this text once and finds it {found} times:\n{old}")
            text = text.replace(old, new) if old else new + "\n"
            done.add((old, new))
    return without(text, frozenset().union(*(p.drops for p in chosen))) if chosen else text


def without(text: str, names: Collection[str]) -> str:
    """`text` without these functions, methods and classes. Raises EditError for one that it does not have."""
    left, lines = set(names), text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda n: -getattr(n, "lineno", 0)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in left and node.end_lineno is not None:
            left.discard(node.name)
            first = node.lineno - 1
            while first and not lines[first - 1].strip():  # the blank lines before it go with it
                first -= 1
            del lines[first : node.end_lineno]
    if left:
        raise EditError(f"there is no {', '.join(sorted(left))} to drop")
    return "".join(lines)
