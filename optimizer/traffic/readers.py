"""Public trace formats -> `Trace`. A broken row is an error that names file, line and column; no row is guessed.

Formats, told apart by their columns:

    azure      csv    TIMESTAMP (wall time), ContextTokens, GeneratedTokens
    burstgpt   csv    Timestamp (s), Request tokens, Response tokens (others ignored)
    mooncake   jsonl  timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
    bailian    jsonl  chat_id, timestamp (s), input_length, output_length, hash_ids (blocks of 16 tokens)

Any of them may say how a request sampled, in columns or keys `temperature` and `top_p`; an empty one says nothing.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
JSONL = ("timestamp", "input_length", "output_length")
SAMPLING = ("temperature", "top_p")
BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}
MAX_TOKENS = 100_000_000  # a length over this is a broken cell, not a request


class TraceError(ValueError):
    """A trace that cannot be read. `line` counts from 1, header included; `column` is the column's or key's name."""

    def __init__(self, file: str, line: int, column: str, problem: str, mend: str) -> None:
        where = f"line {line}" + (f", column {column}" if column else "")
        super().__init__(f"{file}, {where}: {problem} {mend}")
        self.file, self.line, self.column, self.problem, self.mend = file, line, column, problem, mend


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `at`: seconds since the first. `blocks`: ids of its prefix blocks, where the trace has them."""

    at: float
    isl: int
    osl: int
    blocks: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `dropped` counts rows with a zero length: failures in the source."""

    name: str
    kind: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = 0
    dropped: int = 0
    notes: tuple[str, ...] = field(default=())


def read_trace(path: Path) -> Trace:
    """The trace in `path`. Raises TraceError for a file or row that cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(path.name, 1, "", "the file is not UTF-8 text.", "Export it as CSV or JSON lines.") from error
    except OSError as error:
        raise TraceError(path.name, 0, "", f"the file cannot be read: {error.strerror}.", "Check its path.") from error
    return parse_trace(text, path.name)


def parse_trace(text: str, name: str) -> Trace:
    """As `read_trace`, from text already in memory (an upload). `name` is used in messages."""
    first = text.lstrip().split("\n", 1)[0]
    if not first:
        raise TraceError(name, 1, "", "the file is empty.", "Give a trace with at least two requests.")
    kind, raw = _jsonl(text, name) if first.startswith("{") else _csv(text, name)
    rows = list(raw)
    kept = [r for r in rows if r.isl > 0 and r.osl > 0]
    if len(kept) < 2:
        raise TraceError(name, 1, "", f"the file holds {len(kept)} usable requests.", "Give a trace with at least two.")
    notes = []
    if any(b.at < a.at for a, b in pairwise(kept)):
        notes.append("rows were not in order of arrival: sorted")
        kept.sort(key=lambda r: r.at)
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} of {len(rows)} rows with a zero length were dropped")
    start = kept[0].at
    shifted = tuple(replace(r, at=r.at - start) for r in kept)
    return Trace(name, kind, shifted, BLOCK_TOKENS.get(kind, 0), len(rows) - len(kept), tuple(notes))


def _csv(text: str, name: str) -> tuple[str, Iterator[TraceRow]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    header = [cell.strip() for cell in next(reader)]
    for kind, wanted, when in (("azure", AZURE, _wall_seconds), ("burstgpt", BURSTGPT, _number)):
        if wanted[0] not in header:
            continue
        missing = [c for c in wanted if c not in header]
        if missing:
            raise TraceError(name, 1, missing[0], "the header lacks this column.", f"Needed: {', '.join(wanted)}.")
        return kind, _csv_rows(reader, header, wanted, when, name)
    mend = f"Known headers: {', '.join(AZURE)}; or {', '.join(BURSTGPT)}; or JSON lines with {', '.join(JSONL)}."
    raise TraceError(name, 1, header[0], "this is not the header of a trace that is known.", mend)


def _csv_rows(
    reader: Any, header: list[str], wanted: tuple[str, ...], when: Callable[[str], float], name: str
) -> Iterator[TraceRow]:
    index = [header.index(c) for c in wanted]
    said = [c for c in SAMPLING if c in header]
    for cells in _checked(reader, name):
        if not any(c.strip() for c in cells):
            continue
        line = reader.line_num
        for column in (*wanted, *said):
            if header.index(column) >= len(cells):
                raise TraceError(name, line, column, f"the row has {len(cells)} cells.", "Complete or remove it.")
        at = _cell(when, cells[index[0]], name, line, wanted[0])
        isl, osl = (_cell(_tokens, cells[i], name, line, c) for c, i in zip(wanted[1:], index[1:], strict=True))
        yield TraceRow(at, int(isl), int(osl), (), *_sampling({c: cells[header.index(c)] for c in said}, name, line))


def _checked(reader: Any, name: str) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise TraceError(name, reader.line_num, "", f"this is not CSV ({error}).", "Repair the line.") from error


def _jsonl(text: str, name: str) -> tuple[str, Iterator[TraceRow]]:
    first = text.lstrip().split("\n", 1)[0]
    kind = "bailian" if '"chat_id"' in first else "mooncake"
    return kind, _jsonl_rows(text, name, 1.0 if kind == "bailian" else 1e-3)


def _jsonl_rows(text: str, name: str, unit_s: float) -> Iterator[TraceRow]:
    for line, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
        except json.JSONDecodeError as error:
            problem = f"this is not JSON ({error.msg} at character {error.colno})."
            raise TraceError(name, line, f"character {error.colno}", problem, "Repair or remove the line.") from error
        if not isinstance(row, dict):
            raise TraceError(name, line, "", "the line is not a JSON object.", "Each line is one request: {...}.")
        for key in JSONL:
            if key not in row:
                raise TraceError(name, line, key, "the request lacks this key.", f"Needed: {', '.join(JSONL)}.")
        at = _cell(_number, row["timestamp"], name, line, "timestamp") * unit_s
        isl = _cell(_tokens, row["input_length"], name, line, "input_length")
        osl = _cell(_tokens, row["output_length"], name, line, "output_length")
        blocks = _blocks(row.get("hash_ids", []), name, line)
        yield TraceRow(at, int(isl), int(osl), blocks, *_sampling(row, name, line))


def _blocks(ids: Any, name: str, line: int) -> tuple[int, ...]:
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        return tuple(ids)
    raise TraceError(name, line, "hash_ids", "this is not a list of whole numbers.", "Repair or remove the line.")


def _sampling(row: Mapping[str, Any], name: str, line: int) -> list[float | None]:
    """Temperature and top-p of a row, None where it does not say."""
    return [
        _cell(parse, row[c], name, line, c) if row.get(c) not in (None, "") else None
        for c, parse in zip(SAMPLING, (_temperature, _share), strict=True)
    ]


def _cell(parse: Callable[[Any], float], value: Any, name: str, line: int, column: str) -> float:
    try:
        return parse(value)
    except ValueError as error:
        raise TraceError(name, line, column, f"{str(value)[:40]!r} {error}.", "Repair or remove the row.") from error


def _tokens(value: Any) -> float:
    """A length in tokens: a whole number, never negative."""
    try:
        number = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None:
        raise ValueError("is not a whole number of tokens")
    if number < 0:
        raise ValueError("is negative")
    if number > MAX_TOKENS:
        raise ValueError("is too large to be a number of tokens")
    return number


def _number(value: Any, what: str = "a time", most: float = math.inf) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not 0 <= number <= most:
        raise ValueError(f"is not {what}")
    return number


def _temperature(value: Any) -> float:
    return _number(value, "a temperature from 0 to 2", 2.0)


def _share(value: Any) -> float:
    number = _number(value, "a share from 0 to 1", 1.0)
    if not number:
        raise ValueError("would leave no token to draw")
    return number


def _wall_seconds(value: str) -> float:
    """Wall time to seconds. Naive times count as UTC; seven fractional digits are cut to microseconds by the parser."""
    try:
        when = datetime.fromisoformat(value.strip())
    except ValueError:
        raise ValueError("is not a date and time") from None
    return when.replace(tzinfo=when.tzinfo or UTC).timestamp()
