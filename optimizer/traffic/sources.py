"""Where a profile comes from: a form's values, a preset, an imported trace, or a stored profile."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, median_low
from typing import Any

import numpy as np

from optimizer.traffic.profile import LEVELS, WINDOWS, SharedPrefix, TrafficError, TrafficProfile
from optimizer.traffic.readers import Trace, read_trace
from optimizer.traffic.trace_stats import trace_stats

PRESETS = Path(__file__).with_name("presets.json")
KEPT_ROWS = 256  # of each window of a trace
SEARCH_SHARE = 2 / 3  # of a trace, in time: the search sees the first part only
TRACE_GROUPS = 8  # shared prefixes that a trace's reuse is modelled with
FORM_FIELDS = (
    "name", "isl_median", "isl_p95", "osl_median", "osl_p95", "concurrency", "request_rate", "arrival_cv",
    "shared_prefix_share", "shared_prefix_tokens", "shared_prefix_groups", "temperature", "top_p",
)  # fmt: skip


def load_traffic(
    ref: str, concurrency: int = 0, temperature: float | None = None, top_p: float | None = None
) -> TrafficProfile:
    """The profile that `ref` names: a preset, a stored profile (.json), or a trace file.

    `concurrency` 0 keeps the source's own, as None does of the others. Raises TrafficError (no such thing, or a damaged
    profile) or TraceError.
    """
    if ref in presets():
        profile = presets()[ref]
    elif not Path(ref).is_file():
        known = ", ".join(presets())
        raise TrafficError(f"There is no traffic {ref!r}: name a preset ({known}), a trace or a profile file.")
    elif Path(ref).suffix == ".json":
        profile = _stored(Path(ref))
    else:
        profile = profile_from_trace(read_trace(Path(ref)))
    profile = replace(profile, concurrency=concurrency) if concurrency else profile
    return profile.sampled(temperature, top_p)


@cache
def presets() -> dict[str, TrafficProfile]:
    return {p["name"]: TrafficProfile.from_json(p) for p in json.loads(PRESETS.read_text())}


def profile_from_form(values: dict[str, Any]) -> TrafficProfile:
    """Medians and 95th percentiles to a profile: lengths are taken as log-normal. Missing optional values get defaults.

    Raises TrafficError that names the field, in the form's own words.
    """
    unknown = sorted(set(values) - set(FORM_FIELDS))
    if unknown:
        raise TrafficError(f"The traffic form has no field {unknown[0]!r}: it has {', '.join(FORM_FIELDS)}.")
    return TrafficProfile(
        name=str(values.get("name") or "custom"),
        isl=_lognormal(values, "isl"),
        osl=_lognormal(values, "osl"),
        source="form",
        concurrency=int(_form_number(values, "concurrency", 4)),
        request_rate=_form_number(values, "request_rate", 0.0),
        arrival_cv=_form_number(values, "arrival_cv", 1.0),
        shared_prefix=SharedPrefix(
            _form_number(values, "shared_prefix_share", 0.0),
            int(_form_number(values, "shared_prefix_tokens", 0)),
            int(_form_number(values, "shared_prefix_groups", 1)),
        ),
    ).sampled(_form_given(values, "temperature"), _form_given(values, "top_p"))


def profile_from_trace(trace: Trace, concurrency: int = 4) -> TrafficProfile:
    """Quantiles of the whole trace; rows thinned from its first two thirds (search) and its last (held out)."""
    stats = trace_stats(trace)
    cut = max(1, min(len(trace.rows) - 1, int(SEARCH_SHARE * len(trace.rows))))
    parts = dict(zip(WINDOWS, (trace.rows[:cut], trace.rows[cut:]), strict=True))
    rows = {w: tuple((r.isl, r.osl) for r in _thin(list(part))) for w, part in parts.items()}
    notes = [
        *trace.notes,
        f"{stats.requests} requests over {stats.span_s:.0f} s; {len(rows['search'])} rows kept for the search, "
        f"{len(rows['heldout'])} from the last third held out",
    ]
    prefix = SharedPrefix()
    if stats.prefix.share:
        prefix = SharedPrefix(round(stats.prefix.share, 4), round(stats.prefix.tokens), TRACE_GROUPS)
        hit = f"ideal block hit rate {stats.prefix.hit_rate:.3f}"
        notes.append(f"prefix reuse ({hit}) is modelled with {TRACE_GROUPS} shared prefixes")
    temperature, top_p = _sampling(trace, notes)
    return TrafficProfile(
        name=Path(trace.name).stem,
        isl=fit([r.isl for r in trace.rows]),
        osl=fit([r.osl for r in trace.rows]),
        source=trace.kind,
        concurrency=concurrency,
        request_rate=stats.rate,
        arrival_cv=max(stats.arrival_cv, 1e-6),
        shared_prefix=prefix,
        temperature=temperature,
        top_p=top_p,
        rows=rows,
        notes=tuple(notes),
    )


def _sampling(trace: Trace, notes: list[str]) -> tuple[float | None, float]:
    """One temperature and top-p for all requests: the medians of those that say. A note tells when they differ."""
    said = [(r.temperature, 1.0 if r.top_p is None else r.top_p) for r in trace.rows if r.temperature is not None]
    if not said:
        return None, 1.0
    temperature, top_p = (median_low(values) for values in zip(*said, strict=True))
    if len(said) < len(trace.rows) or len(set(said)) > 1:
        low, high = min(said)[0], max(said)[0]
        notes.append(
            f"{len(said)} of {len(trace.rows)} requests give a temperature, from {low:g} to {high:g}: "
            f"all are replayed at the median"
        )
    return temperature, top_p if temperature else 1.0


def fit(lengths: list[int]) -> tuple[float, ...]:
    return tuple(round(float(q), 2) for q in np.quantile(lengths, LEVELS))


def _stored(path: Path) -> TrafficProfile:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise TrafficError(f"{path.name} is not JSON ({error}): give a stored traffic profile.") from error
    if not isinstance(data, dict):
        raise TrafficError(f"{path.name} is not a stored traffic profile: it must be one JSON object.")
    return TrafficProfile.from_json(data)


def _thin(rows: list[Any]) -> list[Any]:
    if len(rows) <= KEPT_ROWS:
        return rows
    return [rows[i * len(rows) // KEPT_ROWS] for i in range(KEPT_ROWS)]


def _lognormal(values: dict[str, Any], name: str) -> tuple[float, ...]:
    median = _form_number(values, f"{name}_median", None)
    p95 = _form_number(values, f"{name}_p95", 2 * median)
    if median < 1:
        raise TrafficError(f"{name}_median is {median:g}: give a length of at least 1 token.")
    if p95 < median:
        raise TrafficError(f"{name}_p95 is {p95:g}, under the median of {median:g}: give a larger one.")
    sigma = math.log(p95 / median) / NormalDist().inv_cdf(0.95)
    levels = [min(max(level, 0.005), 0.995) for level in LEVELS]
    return tuple(max(1.0, round(median * math.exp(sigma * NormalDist().inv_cdf(level)), 2)) for level in levels)


def _form_given(values: dict[str, Any], name: str) -> float | None:
    return None if values.get(name) in (None, "") else _form_number(values, name, None)


def _form_number(values: dict[str, Any], name: str, default: float | None) -> float:
    value = values.get(name)
    if value is None or value == "":
        if default is None:
            raise TrafficError(f"{name} is empty: give a length in tokens.")
        return float(default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise TrafficError(f"{name} is {str(value)[:40]!r}: give a number.")
    return number
