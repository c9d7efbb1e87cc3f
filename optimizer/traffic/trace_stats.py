"""Figures of a trace: rates, lengths, burstiness and how much of its prompts an unbounded prefix cache would hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.traffic.readers import Trace


@dataclass(frozen=True, slots=True)
class LengthStats:
    mean: float
    median: float
    p99: float


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """`hit_rate`: blocks of leading runs already seen, over all. `share`: requests with a hit. `tokens`: their mean."""

    hit_rate: float
    share: float
    tokens: float


@dataclass(frozen=True, slots=True)
class TraceStats:
    requests: int
    span_s: float
    rate: float  # requests a second
    arrival_cv: float  # standard deviation over mean of the gaps between arrivals
    isl: LengthStats
    osl: LengthStats
    prefix: PrefixStats


def trace_stats(trace: Trace) -> TraceStats:
    at = np.array([r.at for r in trace.rows])
    gaps = np.diff(at)
    span = float(at[-1] - at[0])
    mean_gap = float(gaps.mean())
    return TraceStats(
        requests=len(trace.rows),
        span_s=span,
        rate=1.0 / mean_gap if mean_gap > 0 else 0.0,
        arrival_cv=float(gaps.std()) / mean_gap if mean_gap > 0 else 0.0,
        isl=_lengths([r.isl for r in trace.rows]),
        osl=_lengths([r.osl for r in trace.rows]),
        prefix=prefix_stats(trace),
    )


def prefix_stats(trace: Trace) -> PrefixStats:
    """What an unbounded cache would hit: for each request, the leading run of blocks that an earlier one brought."""
    seen: set[int] = set()
    blocks = hits = with_hit = 0
    for row in trace.rows:
        run = next((i for i, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        blocks, hits, with_hit = blocks + len(row.blocks), hits + run, with_hit + (run > 0)
        seen.update(row.blocks)
    if not blocks:
        return PrefixStats(0.0, 0.0, 0.0)
    tokens = hits * trace.block_tokens / with_hit if with_hit else 0.0
    return PrefixStats(hits / blocks, with_hit / len(trace.rows), tokens)


def _lengths(values: list[int]) -> LengthStats:
    return LengthStats(float(np.mean(values)), float(np.median(values)), float(np.percentile(values, 99)))
