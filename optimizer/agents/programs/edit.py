"""Parts: small edits of a baseline's sources, kept as text. A candidate is the baseline with some parts put in.

A part file has a head of `key: value` lines, then hunks. Each hunk names text that stands at most once in a source file
and in one at least, and what it becomes; so a program differs from the baseline by its parts and by nothing else:

    <<<<
    text as it is
    ====
    text as it becomes
    >>>>

A hunk whose new text keeps the old one inserts, and several parts may insert at one place. A hunk without old text
replaces all sources; a part with `source` has no hunks and replaces them with that file of `engine/`. A hunk that begins with
`<<<<?` is for text that not every baseline has. `drops` names functions and classes that nothing calls any more; those
ending in `?` are not in every baseline.
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
HUNK = re.compile(r"^<<<<(\??)\n(.*?)^====\n(.*?)^>>>>\n", re.S | re.M)


class EditError(ValueError):
    """A part does not fit the source: it or another part was written for another text."""


@dataclass(frozen=True, slots=True)
class Hunk:
    old: str
    new: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One idea. Two parts fit together when their slots are disjoint and what they need is there.

    `gains` says how many times faster each operator is expected to become, before anything was measured.
    """

    name: str
    title: str
    focus: str
    slots: frozenset[str]  # regions of the forward pass that it rewrites
    hunks: tuple[Hunk, ...]
    why: str  # the hypothesis; {..} takes figures of the run (see agents/words.py)
    gains: Mapping[str, float] = field(default_factory=dict, hash=False)
    mechanism: str = "python"
    kernel: str = ""  # operator of kernels/ whose source and calling code it carries
    needs: frozenset[str] = frozenset()  # parts that must be there too
    drops: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()  # served dtypes it works in; empty: all
    baselines: frozenset[str] = frozenset({"llama"})  # whose sources it edits
    unless: frozenset[str] = frozenset()  # fields of the model's config that it cannot serve when they are set
    only: frozenset[str] = frozenset()  # fields of the config without which it has nothing to do
    device: str = "cpu"  # or cuda: where it computes


def parse(name: str, text: str) -> Part:
    """Raises EditError for a text without hunks or whose head lacks a field."""
    head, mark, body = text.partition("<<<<")
    fields = dict(line.split(": ", 1) for line in re.sub(r"\n +", " ", head).strip().splitlines())
    hunks = tuple(Hunk(m[2][:-1], m[3][:-1], bool(m[1])) for m in HUNK.finditer(mark + body))
    if "source" in fields:
        hunks = (Hunk("", (ENGINE / fields["source"]).read_text()[:-1]),)
    missing = {"title", "focus", "slots", "why"} - fields.keys()
    if missing or not hunks:
        raise EditError(f"part {name} lacks {', '.join(sorted(missing)) or 'hunks'}")
    gains = {k: float(v) for k, v in (pair.split("=") for pair in fields.get("gains", "").split())}
    named = ("slots", "needs", "drops", "dtypes", "baselines", "unless", "only")
    sets = {key: frozenset(fields[key].split()) for key in named if key in fields}
    texts = {key: fields[key] for key in ("title", "focus", "why", "mechanism", "kernel", "device") if key in fields}
    return Part(name=name, hunks=hunks, gains=gains, **texts, **sets)


@cache
def parts() -> dict[str, Part]:
    """All parts by name. A part stands after those it needs, so that this is also an order to put them in."""
    read = {p.stem: parse(p.stem, p.read_text()) for p in sorted(FOLDER.glob("*.edit"))}
    return dict(sorted(read.items(), key=lambda item: (len(item[1].needs), item[0])))


def put_in(files: Mapping[str, str], chosen: Sequence[Part]) -> dict[str, str]:
    """The sources with the parts' hunks; a hunk that several parts share is put in once.

    Raises EditError naming the part and the text that does not stand once.
    """
    made, done = dict(files), set[Hunk]()
    for part in chosen:
        for hunk in part.hunks:
            if hunk not in done:
                made = put_hunk(made, hunk, part.name)
                done.add(hunk)
    return without(made, frozenset().union(*(p.drops for p in chosen))) if chosen else made


def put_hunk(files: Mapping[str, str], hunk: Hunk, name: str) -> dict[str, str]:
    if not hunk.old:
        return {"forward.py": hunk.new + "\n"}
    found = {file: text.count(hunk.old) for file, text in files.items()}
    if max(found.values()) > 1 or (not any(found.values()) and not hunk.optional):
        message = f"part {name} looks for this text once and finds it {max(found.values())} times:\n{hunk.old}"
        raise EditError(message)
    return {file: text.replace(hunk.old, hunk.new) for file, text in files.items()}


def without(files: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The sources without these functions, methods and classes. Raises EditError for one that none of them has."""
    wanted = {name.removesuffix("?") for name in names}
    found: set[str] = set()
    made = {file: _without(text, wanted, found) for file, text in files.items()}
    left = {name for name in names if not name.endswith("?")} - found
    if left:
        raise EditError(f"there is no {', '.join(sorted(left))} to drop")
    return made


def _without(text: str, names: Collection[str], found: set[str]) -> str:
    """One source without what it has of `names`, which is added to `found`."""
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda n: -getattr(n, "lineno", 0)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names and node.end_lineno is not None:
            found.add(node.name)
            first = node.lineno - 1
            while first and not lines[first - 1].strip():  # the blank lines before it go with it
                first -= 1
            del lines[first : node.end_lineno]
    return "".join(lines)
