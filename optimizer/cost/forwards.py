"""Seconds of a whole forward on this machine: its operators' roofline by measured ceilings, and what measured forwards add to it.

A forward is described by (batch, prefill tokens, KV tokens read). Its time is a sum of physical times (weights read, products,
keys read, scores) and of costs by the row, sequence and step, with coefficients for each program: those of the known program
that is most like it, moved to what was measured of its own. A program of which nothing was measured has its roofline alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.models.config import ModelConfig
from optimizer.cost.positive_fit import Floats, Prior, fit_positive
from optimizer.cost.roofline import DTYPE_BYTES, Ceilings, weights_read
from optimizer.records import Provenance

TERMS = ("read", "multiply", "keys", "scores", "row", "many", "sequence", "prompt", "step")
START = np.array([1.0, 1.0, 1.0, 1.0, 0.3, 0.3, 0.5, 0.5, 1.0])
FEW_ROWS = 16  # up to here a row's cost adds up; beyond, products go another way
ROW_S, MANY_S, STEP_S = 1e-4, 1e-2, 1e-3
PULL, OWN_PULL = 0.15, 0.1  # of logs of coefficients towards START, and towards the program that is most like
SCALE = 0.1  # log error beyond which a measurement counts less
ENOUGH = 4  # forwards of a program that make its estimates fitted
Z80 = 1.2816
LEAST_SPREAD, WIDER = 0.08, 2.0  # of log seconds; how much wider outside of what was fitted


@dataclass(frozen=True, slots=True)
class Forward:
    """`batch` sequences that decode, `prefill_tokens` of prompts, `kv_tokens` positions read, once for each query."""

    batch: int
    prefill_tokens: int
    kv_tokens: int

    def __post_init__(self) -> None:
        if min(self.batch, self.prefill_tokens) < 0 or self.tokens < 1 or self.kv_tokens < self.tokens:
            raise ValueError(f"{self} is no forward: it needs a token, and every token reads at least itself")

    @property
    def tokens(self) -> int:
        return self.batch + self.prefill_tokens

    @property
    def rows(self) -> int:
        """Of logits."""
        return self.batch + (self.prefill_tokens > 0)


@dataclass(frozen=True, slots=True)
class ForwardEstimate:
    """Seconds, with an interval meant to hold four of five, and what stands behind them."""

    seconds: float
    low: float
    high: float
    provenance: Provenance
    reasons: tuple[str, ...] = ()


@dataclass
class ForwardModel:
    """Learns measured forwards, program by program; predicts others. Not for several threads."""

    config: ModelConfig
    dtype: str
    ceilings: Ceilings
    _seen: dict[str, dict[Forward, list[float]]] = field(default_factory=dict)
    _fits: dict[str, Floats] = field(default_factory=dict)

    def learn(self, program: str, forward: Forward, seconds: float) -> None:
        """Raises ValueError for a time that is none."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{seconds} seconds is no measured time")
        self._seen.setdefault(program, {}).setdefault(forward, []).append(seconds)
        self._fits.clear()

    def predict(self, program: str, forward: Forward) -> ForwardEstimate:
        seen = self._seen.get(program, {})
        if forward in seen:
            times = seen[forward]
            middle = statistics.median(times)
            low, high = (min(times), max(times)) if len(times) > 2 else _around(middle, LEAST_SPREAD)
            return ForwardEstimate(middle, low, high, Provenance.MEASURED)
        floor = self.floor_s(forward)
        if len(seen) < ENOUGH:
            provenance = Provenance.ROOFLINE if self.ceilings.measured else Provenance.UNVALIDATED
            reason = f"{len(seen)} forwards of this program were measured, {ENOUGH} are needed"
            return ForwardEstimate(floor, floor, math.inf, provenance, (reason,))
        coefficients = self._coefficients(program)
        seconds = float(self.terms(forward) @ coefficients)
        beyond = tuple(_beyond(forward, seen))
        spread = self._spread(seen, coefficients) * (WIDER if beyond else 1.0)
        provenance = Provenance.EXTRAPOLATED if beyond else Provenance.FITTED
        return ForwardEstimate(seconds, *_around(seconds, spread), provenance, beyond)

    def floor_s(self, forward: Forward) -> float:
        """The operators' roofline, one after the other."""
        read, multiply, keys, scores = self.terms(forward)[:4]
        return float(max(read, multiply) + max(keys, scores))

    def terms(self, forward: Forward) -> Floats:
        """Seconds, in the order of TERMS. What attention reads is told apart by the share of tokens that decode."""
        config, f = self.config, forward
        size, layers, heads = DTYPE_BYTES[self.dtype], config.num_hidden_layers, config.num_attention_heads
        matrices, head = weights_read(config), config.vocab_size * config.hidden_size
        decoding = f.batch / f.tokens
        return np.array(
            [
                (matrices + head) * size / self.ceilings.read,
                2 * (f.tokens * matrices + f.rows * head) / self.ceilings.gemm,
                f.kv_tokens * decoding * config.kv_width * layers * size / self.ceilings.read,
                f.kv_tokens * (1 - decoding) * 4 * heads * config.head_dim * layers / self.ceilings.gemm,
                min(f.tokens, FEW_ROWS) * ROW_S,
                (f.tokens > FEW_ROWS) * MANY_S,
                f.batch * ROW_S,
                (f.prefill_tokens > 0) * STEP_S,
                STEP_S,
            ]
        )

    def _coefficients(self, program: str) -> Floats:
        if program not in self._fits:
            seen = self._seen[program]
            others = [self._alone(p) for p, s in self._seen.items() if p != program and len(s) > len(TERMS)]
            start = self._most_like(seen, others) if others else START
            self._fits[program] = self._fit(seen, start, OWN_PULL if others else PULL)
        return self._fits[program]

    def _alone(self, program: str) -> Floats:
        key = f"{program} alone"
        if key not in self._fits:
            self._fits[key] = self._fit(self._seen[program], START, PULL)
        return self._fits[key]

    def _most_like(self, seen: Mapping[Forward, Sequence[float]], others: Iterable[Floats]) -> Floats:
        """Coefficients of the program whose curve has the shape of these forwards, moved half of the way to their level."""
        terms, measured = self._table(seen)

        def off(coefficients: Floats) -> tuple[float, float]:
            distance = np.log(measured) - np.log(terms @ coefficients)
            level = float(np.median(distance))
            return float(np.abs(distance - level).mean()) + 0.3 * abs(level), level

        best = min(others, key=lambda c: off(c)[0])
        return np.asarray(best * math.exp(off(best)[1] / 2))

    def _fit(self, seen: Mapping[Forward, Sequence[float]], start: Floats, pull: float) -> Floats:
        terms, measured = self._table(seen)
        prior = Prior(start, np.full(len(TERMS), 1e-9), np.full(len(TERMS), 1e6), pull)
        return fit_positive(terms, measured, prior, scale=SCALE)[0]

    def _table(self, seen: Mapping[Forward, Sequence[float]]) -> tuple[Floats, Floats]:
        """(terms [forwards, terms], median seconds [forwards])."""
        return np.array([self.terms(f) for f in seen]), np.array([statistics.median(t) for t in seen.values()])

    def _spread(self, seen: Mapping[Forward, Sequence[float]], coefficients: Floats) -> float:
        """Half an interval of log seconds, from how far the fit is from what it was fitted on; few forwards tell little."""
        terms, measured = self._table(seen)
        middle = float(np.median(np.abs(np.log(terms @ coefficients / measured))))
        return max(LEAST_SPREAD, Z80 * 1.4826 * middle * (1 + len(TERMS) / len(seen)))


def _beyond(forward: Forward, seen: Iterable[Forward]) -> Iterable[str]:
    """What of `forward` lies outside of the forwards that were measured."""
    known = list(seen)
    for name in ("batch", "prefill_tokens", "kv_tokens"):
        value, least, most = getattr(forward, name), *_ends(getattr(f, name) for f in known)
        if not least <= value <= most:
            yield f"{name.replace('_', ' ')}: {value} is outside {least} to {most}"


def _ends(values: Iterable[int]) -> tuple[int, int]:
    found = list(values)
    return min(found), max(found)


def _around(seconds: float, spread: float) -> tuple[float, float]:
    return seconds * math.exp(-spread), seconds * math.exp(spread)
