"""Building the wire form of an engine step. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.wire import WireBatch

PREFILL, DECODE = 0, 1


@dataclass(frozen=True, slots=True)
class SeqStep:
    """What one sequence adds to a step: `token_ids` at positions `start`.., its blocks, and whether its last row is sampled."""

    request_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool = True
    all_logits: bool = False  # every row's logits (teacher forcing in verification)

    @property
    def phase(self) -> int:
        return DECODE if len(self.token_ids) == 1 and self.start > 0 else PREFILL


def make_batch(steps: Sequence[SeqStep], block_size: int) -> WireBatch:
    """One `WireBatch` of `steps`, in their order. Each block table covers its sequence's last position."""
    lengths = np.fromiter((len(s.token_ids) for s in steps), np.int32, len(steps))
    starts = np.fromiter((s.start for s in steps), np.int32, len(steps))
    query_start = np.zeros(len(steps) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], lengths)
    table = np.full((len(steps), max(len(s.block_table) for s in steps)), -1, np.int32)
    for row, step in zip(table, steps, strict=True):
        row[: len(step.block_table)] = step.block_table
    owner = np.repeat(np.arange(len(steps)), lengths)
    slot = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    if slot.size and slot.min() < 0:
        raise ValueError("a position lies past its sequence's block table")
    return WireBatch(
        sequences=len(steps),
        token_ids=np.concatenate([np.asarray(s.token_ids, np.int32) for s in steps]).tobytes(),
        positions=positions.tobytes(),
        query_start=query_start.tobytes(),
        context_len=(starts + lengths).astype(np.int32).tobytes(),
        block_table=table.tobytes(),
        slot=slot.tobytes(),
        logit_rows=_logit_rows(steps, query_start).tobytes(),
        request_id=np.fromiter((s.request_id for s in steps), np.int64, len(steps)).tobytes(),
        phase=np.fromiter((s.phase for s in steps), np.int8, len(steps)).tobytes(),
    )


def _logit_rows(steps: Sequence[SeqStep], query_start: np.ndarray) -> np.ndarray:
    rows: list[int] = []
    for i, step in enumerate(steps):
        if step.all_logits:
            rows.extend(range(query_start[i], query_start[i + 1]))
        elif step.wants_logits:
            rows.append(int(query_start[i + 1]) - 1)
    return np.asarray(rows, np.int32)
