"""A language model's answer as a program: fields as JSON, files in fenced blocks, whole or as edits of the source it was shown.

    ```json
    {"name": "...", "focus": "...", "hypothesis": "...", "expected": 1.1, "settings": {}, "precision": "same"}
    ```
    ```edit forward.py          hunks: <<<< old ==== new >>>>, each old text standing once in the file
    ```python forward.py        or the whole file
    ```cpp name.cpp             a kernel, for settings.library("name")

Edits, because models repeat long files with mistakes and count lines of a diff wrongly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.agents.llm.check import AnswerError, check_program, modules_of
from optimizer.config import FOCI

FENCE = re.compile(r"^(`{3,})[ \t]*([\w+#-]*)[ \t]*([^\n`]*)\n(.*?)^\1[ \t]*$", re.S | re.M)
HUNK = re.compile(r"^<{4,7}[^\n]*\n(.*?)^={4,7}[ \t]*\n(.*?)^>{4,7}[^\n]*$", re.S | re.M)
THINKING = re.compile(r"<think(ing)?>.*?</think(ing)?>", re.S)
FIELDS = frozenset({"name", "focus", "hypothesis", "expected", "settings", "precision", "question", "answers"})
PRECISIONS = ("same", "coded", "int8", "int4")
LONGEST_NAME, LONGEST_HYPOTHESIS, LONGEST_SAID = 60, 600, 300
MOST_ANSWERS = 3


@dataclass(frozen=True, slots=True)
class Base:
    """The source that edits apply to: the best program so far, or the baseline."""

    files: Mapping[str, str]
    name: str = "the baseline"
    settings: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""  # artifact hash, "" for the baseline
    precision: str = "same"  # that it declares, and its edits with it


@dataclass(frozen=True, slots=True)
class Answer:
    name: str
    focus: str
    hypothesis: str
    files: dict[str, str]
    settings: dict[str, Any]
    precision: str
    expected: float  # speed over the baseline, 0 when it was not said
    mechanism: str
    source_hash: str
    question: str = ""  # to the other agents
    answers: Mapping[str, str] = field(default_factory=dict)  # id of a question -> what it says to it


@dataclass(frozen=True, slots=True)
class Allowed:
    """What this run takes."""

    foci: tuple[str, ...] = FOCI
    precisions: tuple[str, ...] = ("same",)
    compiler: bool = True


def read_answer(text: str, base: Base, allowed: Allowed) -> Answer:
    """Raises AnswerError, a sentence that the model is told, for whatever does not give a program that may be tried."""
    blocks = [(m[2].lower(), m[3].strip(), m[4]) for m in FENCE.finditer(THINKING.sub("", text))]
    fields = _fields([body for kind, name, body in blocks if kind == "json" and not name])
    files = _files([block for block in blocks if block[1]], base)
    settings = {**base.settings, **_settings(fields)}
    if dict(files) == dict(base.files) and settings == dict(base.settings):
        raise AnswerError(f"It is {base.name}, unchanged: give blocks that name a file, or settings.")
    source = check_program(
        files,
        settings,
        known_settings=frozenset(base.settings),
        compiler=allowed.compiler,
        known_modules=modules_of(base.files),
    )
    return Answer(
        name=_name(fields),
        focus=_choice(fields, "focus", allowed.foci),
        hypothesis=plain(_text(fields, "hypothesis"))[:LONGEST_HYPOTHESIS],
        files=files,
        settings=settings,
        precision=_choice({"precision": base.precision} | fields, "precision", allowed.precisions),
        expected=_expected(fields),
        mechanism=mechanism_of(files, base),
        source_hash=source,
        question=_said(fields.get("question")),
        answers=_answers(fields.get("answers")),
    )


def mechanism_of(files: Mapping[str, str], base: Base) -> str:
    """python | cpp | compile | settings, by what the program holds."""
    if dict(files) == dict(base.files):
        return "settings"
    if any(name.endswith(".cpp") for name in files):
        return "cpp"
    return "compile" if any("torch.compile" in text for text in files.values()) else "python"


def plain(text: str) -> str:
    """In one line, without what could steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _fields(found: list[str]) -> dict[str, Any]:
    if len(found) != 1:
        raise AnswerError(f"It has {len(found)} json blocks: give exactly one, with name, focus and hypothesis.")
    try:
        fields = json.loads(found[0])
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"The json block cannot be read: {error}.") from None
    if not isinstance(fields, dict):
        raise AnswerError("The json block is no object.")
    unknown = sorted(set(fields) - FIELDS)
    if unknown:
        raise AnswerError(
            f"The json block has an unknown field {plain(unknown[0])!r}: it takes {', '.join(sorted(FIELDS))}."
        )
    return fields


def _files(blocks: list[tuple[str, str, str]], base: Base) -> dict[str, str]:
    """The base's files with the blocks put in, without kernels that nothing calls any more."""
    files = dict(base.files)
    seen: set[str] = set()
    for kind, name, body in blocks:
        if name in seen:
            raise AnswerError(f"Two blocks are for {plain(name)!r}: give one.")
        seen.add(name)
        files[name] = edited(files.get(name), name, body) if kind == "edit" else body
    python = "".join(text for name, text in files.items() if name.endswith(".py"))
    idle = {n for n in files if n.endswith(".cpp") and f'"{n.removesuffix(".cpp")}"' not in python.replace("'", '"')}
    return {name: text for name, text in files.items() if name not in idle or name in seen}


def edited(text: str | None, name: str, body: str) -> str:
    """`text` with the block's hunks. Raises AnswerError for a text that does not stand exactly once."""
    if text is None:
        raise AnswerError(f"There is no {plain(name)!r} to edit: give it whole, in a block of its language.")
    hunks = HUNK.findall(body)
    if not hunks:
        raise AnswerError(
            f"The edit of {plain(name)!r} has no hunk: <<<<, old text, ====, new text, >>>>, a line each."
        )
    for old, new in hunks:
        if text.count(old) != 1:  # not whole lines, or the file ends there: part of a line will do
            old, new = old.removesuffix("\n"), new.removesuffix("\n")
        count = text.count(old) if old.strip() else 0
        if count != 1:
            raise AnswerError(f"The edit of {name!r} looks for this text once and finds it {count} times:\n{old[:400]}")
        text = text.replace(old, new)
    return text


def _name(fields: Mapping[str, Any]) -> str:
    """Letters, digits and a few signs: names of built-in programs say which parts they hold, and nobody may forge one."""
    name = " ".join(re.sub(r"[^\w ,.:/*-]", " ", _text(fields, "name"), flags=re.ASCII).split())
    if not name:
        raise AnswerError("The name holds no letter.")
    return name[:LONGEST_NAME]


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise AnswerError(f"The json block lacks {name!r}, a text.")
    return value


def _choice(fields: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = fields.get(name)
    if value not in choices:
        raise AnswerError(f"{name} is {str(value)[:40]!r}: it must be one of {', '.join(choices)} in this run.")
    return str(value)


def _said(value: Any) -> str:
    """A sentence for the board; "" for what is none: no program is refused for it."""
    return plain(value)[:LONGEST_SAID] if isinstance(value, str) else ""


def _answers(value: Any) -> dict[str, str]:
    found = {str(key): _said(text) for key, text in value.items()} if isinstance(value, dict) else {}
    return dict([(key, text) for key, text in found.items() if text][:MOST_ANSWERS])


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    value = fields.get("settings") or {}
    if not isinstance(value, dict):
        raise AnswerError("settings is no object.")
    return value


def _expected(fields: Mapping[str, Any]) -> float:
    value = fields.get("expected", 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise AnswerError("expected is the speed over the baseline that you expect: a number such as 1.08.")
    return float(value)
