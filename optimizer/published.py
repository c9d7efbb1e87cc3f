"""Published serving results in InferenceX's JSON, to be drawn beside ours. They are of other hardware, and say so.

Two shapes are read: an aggregated result (`hw`, `tp`, `conc`, `output_tput_per_gpu`, `median_intvty`), and the benchmark's own
(`model_id`, `max_concurrency`, `output_throughput`, `median_tpot`), which does not name its hardware. A file holds one
result, a list of them, or one a line. Times in seconds; a name that ends in `_ms` is in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_RESULTS = 5000
UNSTATED = "hardware not stated"


class PublishedError(ValueError):
    """A file that holds no such results; the text says which row and field, and what is expected."""


@dataclass(frozen=True, slots=True)
class Published:
    """One measured point. `output_tput` in tokens/s, of a device where `per_device`, else of all of them together."""

    model: str
    hardware: str
    framework: str
    precision: str
    devices: int | None
    per_device: bool
    conc: int
    output_tput: float
    interactivity: float  # 1 / median TPOT, tokens/s/user
    median_ttft: float | None = None

    @property
    def label(self) -> str:
        parts = (self.hardware, self.model.rsplit("/", 1)[-1], self.precision, self.framework)
        return " · ".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"label": self.label}


def read_published(text: str) -> list[Published]:
    """Raises PublishedError."""
    rows = list(_rows(text))
    if not rows:
        raise PublishedError("The file holds no results: give InferenceX's JSON, a list of such, or one a line.")
    if len(rows) > MAX_RESULTS:
        raise PublishedError(f"The file holds {len(rows)} results; at most {MAX_RESULTS} are drawn: leave some out.")
    return [_published(row, i) for i, row in enumerate(rows, 1)]


def _rows(text: str) -> Iterable[Any]:
    try:
        found = json.loads(text)
        return found if isinstance(found, list) else [found]
    except json.JSONDecodeError:
        pass
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise PublishedError(f"Line {number} is not JSON: {error.msg}.") from error
    return rows


def _published(row: Any, number: int) -> Published:
    if not isinstance(row, dict):
        raise PublishedError(f"Result {number} is not an object with named fields.")
    aggregated = "output_tput_per_gpu" in row
    tput = _number(row, number, "output_tput_per_gpu" if aggregated else "output_throughput")
    conc = _number(row, number, "conc" if aggregated else "max_concurrency")
    speed = row.get("median_intvty")
    interactivity = (
        _number(row, number, "median_intvty") if speed is not None else 1 / _seconds(row, number, "median_tpot")
    )
    waits = _has(row, "median_ttft")
    return Published(
        model=str(row.get("model") or row.get("model_id") or "model not stated"),
        hardware=str(row.get("hw") or UNSTATED),
        framework=str(row.get("framework") or ""),
        precision=str(row.get("precision") or ""),
        devices=int(_number(row, number, "tp")) if row.get("tp") is not None else None,
        per_device=aggregated,
        conc=int(conc),
        output_tput=tput,
        interactivity=interactivity,
        median_ttft=_seconds(row, number, "median_ttft") if waits else None,
    )


def _has(row: Mapping[str, Any], name: str) -> bool:
    return row.get(name) is not None or row.get(f"{name}_ms") is not None


def _seconds(row: Mapping[str, Any], number: int, name: str) -> float:
    return _number(row, number, name) if row.get(name) is not None else _number(row, number, f"{name}_ms", name) / 1e3


def _number(row: Mapping[str, Any], number: int, name: str, known_as: str = "") -> float:
    """A positive finite number. Raises PublishedError."""
    value = row.get(name)
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = float("nan")
    if isinstance(value, bool) or not 0 < found < float("inf"):
        raise PublishedError(f"Result {number} needs {known_as or name} as a positive number, not {value!r}.")
    return found
