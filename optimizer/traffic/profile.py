"""`TrafficProfile`: the shape of an endpoint's traffic, small enough to store, show and sample. No text.

Lengths are quantiles, or, for an imported trace, a thinned set of its own rows, so that prompt and answer lengths stay
paired. Sampling has two windows that share nothing: `search` is what a search may look at, `heldout` is what the final
figure is measured on. A profile made of rows splits them by time; one of quantiles draws from disjoint cells.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)  # of the stored quantiles
WINDOWS = ("search", "heldout")
CELLS = 4096  # even cells of the unit interval belong to `search`, odd ones to `heldout`
STEP_ISL, STEP_OSL = 0.7548776662466927, 0.5698402909980532  # any run of such steps covers the unit square evenly


class TrafficError(ValueError):
    """A profile that cannot be. The text is a sentence that names the field and what to give."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`share` of the requests begin with one of `groups` prefixes of `tokens` tokens."""

    share: float = 0.0
    tokens: int = 0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One request to send: when (seconds from the window's start), how long, how it chooses its tokens.

    `prefix_group` -1: shares no prefix. `seed` is the request's own, whichever version answers it.
    """

    at: float
    isl: int
    osl: int
    prefix_group: int = -1
    prefix_len: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def sampling(self) -> dict[str, Any]:
        """Fields of a request's body, which are also the engine's `SamplingParams`."""
        if not self.temperature:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """`request_rate` 0 is a closed loop of `concurrency` users; otherwise requests arrive at that rate (a second).

    `temperature` None: nobody said how requests sample, and they are sent greedily.
    """

    name: str
    isl: tuple[float, ...]  # at LEVELS
    osl: tuple[float, ...]  # at LEVELS
    source: str = "form"  # form, preset, or the trace's format
    concurrency: int = 4
    request_rate: float = 0.0
    arrival_cv: float = 1.0
    shared_prefix: SharedPrefix = SharedPrefix()
    temperature: float | None = None
    top_p: float = 1.0
    max_context: int = 0  # prompts and answers over it are clipped in proportion; 0: no limit
    rows: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)  # window -> (isl, osl)
    notes: tuple[str, ...] = ()
    attribution: str = ""

    def __post_init__(self) -> None:
        for name in ("isl", "osl"):
            values = tuple(float(v) for v in getattr(self, name))
            object.__setattr__(self, name, values)
            _need(len(values) == len(LEVELS), f"{name} needs {len(LEVELS)} quantiles, at {LEVELS}.")
            _need(
                all(math.isfinite(v) and v >= 1 for v in values),
                f"{name} has a quantile under 1 token: give positive ones.",
            )
            _need(list(values) == sorted(values), f"{name} has quantiles that fall: give them in rising order.")
        _need(bool(self.name), "a traffic profile needs a name.")
        _need(1 <= self.concurrency <= 4096, f"concurrency is {self.concurrency}: give 1 to 4096.")
        _need(0 <= self.request_rate < math.inf, f"request_rate is {self.request_rate}: give requests a second, or 0.")
        _need(0 < self.arrival_cv < math.inf, f"arrival_cv is {self.arrival_cv}: give a positive number; 1 is Poisson.")
        prefix = self.shared_prefix
        _need(0 <= prefix.share <= 1, f"shared_prefix_share is {prefix.share}: give a share from 0 to 1.")
        _need(prefix.tokens >= 0, "shared_prefix_tokens cannot be negative.")
        _need(prefix.groups >= 1, "shared_prefix_groups is at least 1.")
        temperature = self.temperature or 0.0
        _need(0 <= temperature <= 2, f"temperature is {temperature}: give 0 (greedy) to 2.")
        _need(0 < self.top_p <= 1, f"top_p is {self.top_p}: give a share over 0 and up to 1, which is all tokens.")
        _need(self.top_p == 1 or temperature > 0, f"top_p {self.top_p} does nothing at temperature 0: give one over 0.")
        _need(self.max_context >= 0, f"max_context is {self.max_context}: give tokens, or 0 for no limit.")
        _need(set(self.rows) in (set(), set(WINDOWS)), f"rows needs the windows {', '.join(WINDOWS)}.")
        rows = {w: tuple((int(i), int(o)) for i, o in r) for w, r in self.rows.items()}
        positive = all(r and all(i > 0 and o > 0 for i, o in r) for r in rows.values())
        _need(positive, "rows needs positive lengths in both windows.")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "notes", tuple(self.notes))

    def sample(self, n: int, seed: int, window: str = "search", max_context: int = 0) -> list[RequestShape]:
        """`n` requests of `window`, in order of arrival; the same arguments give the same requests."""
        _need(window in WINDOWS, f"window {window!r} is unknown: {' or '.join(WINDOWS)}.")
        rng, seeds = (random.Random(f"{self.name}|{seed}|{window}{of}") for of in ("", "|tokens"))
        how = {"temperature": self.temperature or 0.0, "top_p": self.top_p}
        limit = min((m for m in (self.max_context, max_context) if m), default=0)
        lengths = self._rows(n, rng, window) if self.rows else self._draws(n, rng, window)
        at, shapes = 0.0, []
        for isl, osl in lengths:
            isl, osl = clip(isl, osl, limit)
            group = rng.randrange(self.shared_prefix.groups) if rng.random() < self.shared_prefix.share else -1
            shared = min(self.shared_prefix.tokens, isl - 1) if group >= 0 else 0
            own = {**how, "seed": seeds.getrandbits(53)}  # a double holds it: JSON of any server does
            shapes.append(RequestShape(at, isl, osl, group if shared else -1, shared, **own))
            at += self._gap(rng)
        return shapes

    def clipped(self, max_context: int) -> TrafficProfile:
        """This profile for a model of `max_context` tokens; the notes say how much of it was clipped."""
        pairs = [p for r in self.rows.values() for p in r] or list(zip(_grid(self.isl), _grid(self.osl), strict=True))
        share = sum(i + o > max_context for i, o in pairs) / len(pairs)
        note = f"{share:.0%} of the requests exceed the context of {max_context} tokens: clipped in proportion"
        return replace(self, max_context=max_context, notes=(*self.notes, note) if share else self.notes)

    def cut(self, tokens: int) -> TrafficProfile:
        """The same requests with answers of at most `tokens`; the notes say so."""
        _need(tokens >= 1, f"answers cannot be cut to {tokens} tokens: give 1 or more.")
        rows = {w: tuple((i, min(o, tokens)) for i, o in r) for w, r in self.rows.items()}
        note = f"answers are cut to their first {tokens} tokens, which is what this objective is about"
        return replace(self, osl=tuple(min(o, tokens) for o in self.osl), rows=rows, notes=(*self.notes, note))

    def sampled(self, temperature: float | None, top_p: float | None = None) -> TrafficProfile:
        """This profile with these in place of its own; None keeps its own."""
        changes = {"temperature": temperature, "top_p": top_p}
        if temperature == 0:
            changes["top_p"] = 1.0 if top_p is None else top_p
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @property
    def sampling_text(self) -> str:
        """How requests choose their tokens, as a clause."""
        if self.temperature is None:
            return "the traffic does not say how its requests sample: they are greedy, which flatters drafts"
        if not self.temperature:
            return "requests are greedy (temperature 0)"
        return f"requests sample at temperature {self.temperature:g}, top-p {self.top_p:g}"

    def burst(self) -> TrafficProfile:
        """Twice as many prompts at once: concurrency and rate doubled, lengths as they are."""
        doubled = {"concurrency": 2 * self.concurrency, "request_rate": 2 * self.request_rate}
        return replace(self, name=f"{self.name} burst", **doubled)

    def stable(self) -> TrafficProfile:
        """Every request of the median shape, evenly spaced."""
        flat = {name: (self.quantile(name, 0.5),) * len(LEVELS) for name in ("isl", "osl")}
        return replace(self, name=f"{self.name} stable", rows={}, arrival_cv=1e-6, **flat)

    def scaled_to(self, capacity: float, share: float) -> TrafficProfile:
        """Arrivals at `share` of a measured `capacity` (requests a second); the notes say so."""
        _need(capacity > 0 and share > 0, "a rate is scaled to a positive share of a positive capacity.")
        was = f" (the trace had {self.request_rate:.3g}/s)" if self.request_rate else ""
        note = f"arrivals scaled to {share:.0%} of the measured capacity of {capacity:.3g} requests/s{was}"
        return replace(self, request_rate=share * capacity, notes=(*self.notes, note))

    def quantile(self, name: str, level: float) -> float:
        """`isl` or `osl` at `level` from 0 to 1, before any clipping."""
        return interpolate(getattr(self, name), level)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return (
            data
            | {k: list(data[k]) for k in ("isl", "osl", "notes")}
            | {"rows": {w: [list(p) for p in r] for w, r in self.rows.items()}}
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrafficProfile:
        """Raises TrafficError for a missing or unknown field: nothing is dropped silently."""
        known = {f.name for f in fields(cls)}
        unknown, missing = sorted(set(data) - known), sorted({"name", "isl", "osl"} - set(data))
        _need(not unknown, f"a traffic profile has no field {unknown[:1]}: it has {', '.join(sorted(known))}.")
        _need(not missing, f"the traffic profile lacks {missing[:1]}.")
        try:
            prefix = SharedPrefix(**data.get("shared_prefix", {}))
            return cls(**{**data, "shared_prefix": prefix})
        except TrafficError:
            raise
        except (TypeError, ValueError) as error:
            raise TrafficError(f"The traffic profile is damaged: {error}.") from error

    def _draws(self, n: int, rng: random.Random, window: str) -> list[tuple[int, int]]:
        odd = WINDOWS.index(window)
        a, b = rng.random(), rng.random()
        return [
            (
                max(1, round(interpolate(self.isl, _cell(a + i * STEP_ISL, odd)))),
                max(1, round(interpolate(self.osl, _cell(b + i * STEP_OSL, odd)))),
            )
            for i in range(n)
        ]

    def _rows(self, n: int, rng: random.Random, window: str) -> list[tuple[int, int]]:
        """Rows of the window without replacement; started over, reshuffled, when there are fewer than `n`."""
        drawn: list[tuple[int, int]] = []
        while len(drawn) < n:
            drawn += rng.sample(self.rows[window], len(self.rows[window]))
        return drawn[:n]

    def _gap(self, rng: random.Random) -> float:
        if not self.request_rate:
            return 0.0
        shape = 1 / self.arrival_cv**2  # a gamma distribution of this shape has this coefficient of variation
        return rng.gammavariate(shape, 1 / (shape * self.request_rate)) if shape < 1e6 else 1 / self.request_rate


def clip(isl: int, osl: int, limit: int) -> tuple[int, int]:
    """Both lengths scaled down alike until they fit `limit` tokens; each stays at least 1."""
    if not limit or isl + osl <= limit:
        return isl, osl
    short = max(1, osl * limit // (isl + osl))
    return max(1, limit - short), short


def interpolate(quantiles: Sequence[float], level: float) -> float:
    level = min(max(level, 0.0), 1.0)
    i = min(bisect_right(LEVELS, level) - 1, len(LEVELS) - 2)
    part = (level - LEVELS[i]) / (LEVELS[i + 1] - LEVELS[i])
    return quantiles[i] + part * (quantiles[i + 1] - quantiles[i])


def _grid(quantiles: Sequence[float]) -> list[float]:
    return [interpolate(quantiles, (i + 0.5) / 200) for i in range(200)]


def _cell(u: float, odd: int) -> float:
    """`u` modulo 1, moved to the middle of the nearest cell of the window's parity."""
    return (2 * int((u % 1.0) * CELLS / 2) + odd + 0.5) / CELLS


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise TrafficError(message[0].upper() + message[1:])
