"""A source diff as rows for the page: highlighted on the server, unified or split. Files are text, never run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from html import escape
from itertools import zip_longest
from typing import NamedTuple

from django.utils.safestring import SafeString, mark_safe
from pygments import lex
from pygments.lexer import Lexer
from pygments.lexers import CppLexer, JsonLexer, PythonLexer, TextLexer
from pygments.token import STANDARD_TYPES, _TokenType

CONTEXT = 3  # unchanged lines kept around a change
LIMIT = 6000  # lines of one file that are drawn


class Row(NamedTuple):
    """`kind`: same, add, del, change (split view: both sides differ) or gap. A number is None where the side has no line."""

    kind: str
    old_no: int | None
    new_no: int | None
    old_html: SafeString
    new_html: SafeString


class FileDiff(NamedTuple):
    name: str
    status: str  # added, removed, changed or same
    added: int
    removed: int
    rows: list[Row]
    cut: bool  # longer than LIMIT: the rest is left out


EMPTY = mark_safe("")


def diff_files(old: Mapping[str, str], new: Mapping[str, str], mode: str = "unified") -> list[FileDiff]:
    """One FileDiff per name in either; changed files first, unchanged ones last. `mode`: unified or split."""
    order = {"changed": 0, "added": 1, "removed": 2, "same": 3}
    found = [_diff(name, old.get(name), new.get(name), mode) for name in sorted({*old, *new})]
    return sorted(found, key=lambda f: order[f.status])


def _diff(name: str, old: str | None, new: str | None, mode: str) -> FileDiff:
    before, after = (old or "").splitlines(), (new or "").splitlines()
    cut = max(len(before), len(after)) > LIMIT
    before, after = before[:LIMIT], after[:LIMIT]
    drawn = highlight(name, before), highlight(name, after)
    rows: list[Row] = []
    for group in difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_grouped_opcodes(CONTEXT):
        rows += _hunk(group, drawn)
    status = "added" if old is None else "removed" if new is None else "changed" if rows else "same"
    counts = [sum(row.kind == kind for row in rows) for kind in ("add", "del")]
    return FileDiff(name, status, counts[0], counts[1], pair_up(rows) if mode == "split" else rows, cut)


def _hunk(group: list[tuple[str, int, int, int, int]], drawn: tuple[list[SafeString], list[SafeString]]) -> list[Row]:
    first, last = group[0], group[-1]
    title = mark_safe(f"@@ -{first[1] + 1},{last[2] - first[1]} +{first[3] + 1},{last[4] - first[3]} @@")
    rows = [Row("gap", None, None, title, title)]
    old, new = drawn
    for tag, a, b, c, d in group:
        if tag == "equal":
            rows += [Row("same", i + 1, c + i - a + 1, old[i], new[c + i - a]) for i in range(a, b)]
            continue
        rows += [Row("del", i + 1, None, old[i], EMPTY) for i in range(a, b)]
        rows += [Row("add", None, i + 1, EMPTY, new[i]) for i in range(c, d)]
    return rows


def pair_up(rows: list[Row]) -> list[Row]:
    """Removed and added lines of one change side by side, in order."""
    pairs: list[Row] = []
    removed: list[Row] = []
    added: list[Row] = []

    def flush() -> None:
        for left, right in zip_longest(removed, added):
            if left and right:
                pairs.append(Row("change", left.old_no, right.new_no, left.old_html, right.new_html))
            else:
                pairs.append(left or right)
        removed.clear()
        added.clear()

    for row in rows:
        if row.kind in ("del", "add"):
            (removed if row.kind == "del" else added).append(row)
        else:
            flush()
            pairs.append(row)
    flush()
    return pairs


def lexer_for(name: str) -> Lexer:
    kind = name.rsplit(".", 1)[-1]
    options = {"stripnl": False, "ensurenl": True}
    if kind == "py":
        return PythonLexer(**options)
    if kind in ("cpp", "h", "hpp", "c"):
        return CppLexer(**options)
    return JsonLexer(**options) if kind == "json" else TextLexer(**options)


def highlight(name: str, lines: list[str]) -> list[SafeString]:
    """One piece of HTML per line; a token that spans lines is closed and opened again at each break."""
    rows: list[list[str]] = [[]]
    for kind, text in lex("\n".join(lines), lexer_for(name)):
        for i, part in enumerate(text.split("\n")):
            if i:
                rows.append([])
            if part:
                rows[-1].append(_span(kind, part))
    rows = rows[: len(lines)] + [[] for _ in range(len(lines) - len(rows))]
    return [mark_safe("".join(row)) for row in rows]


def _span(kind: _TokenType, text: str) -> str:
    name = STANDARD_TYPES.get(kind) or STANDARD_TYPES.get(kind.parent, "")
    return f'<span class="{name}">{escape(text)}</span>' if name and name not in ("n", "p", "w", "o") else escape(text)
