"""Building the wire form of an engine step. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

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
    """One `WireBatch` of `steps`, in their order. Each block table covers its sequence's last position.

    Plain lists, since a decode step leaves few numbers and cold caches: a dozen numpy calls cost twice as much there.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, table, logit_rows = [0], [], []
    width = max(len(s.block_table) for s in steps)
    for s in steps:
        first, count, blocks = len(tokens), len(s.token_ids), s.block_table
        at = range(s.start, s.start + count)
        if count and at[-1] >= len(blocks) * block_size:
            raise ValueError("a position lies past its sequence's block table")
        tokens += s.token_ids
        positions += at
        slots += [blocks[p // block_size] * block_size + p % block_size for p in at]
        starts.append(first + count)
        table += [*blocks, *[-1] * (width - len(blocks))]
        if s.all_logits:
            logit_rows += range(first, first + count)
        elif s.wants_logits:
            logit_rows.append(first + count - 1)
    return WireBatch(
        sequences=len(steps),
        token_ids=array("i", tokens).tobytes(),
        positions=array("i", positions).tobytes(),
        query_start=array("i", starts).tobytes(),
        context_len=array("i", [s.start + len(s.token_ids) for s in steps]).tobytes(),
        block_table=array("i", table).tobytes(),
        slot=array("q", slots).tobytes(),
        logit_rows=array("i", logit_rows).tobytes(),
        request_id=array("q", [s.request_id for s in steps]).tobytes(),
        phase=array("b", [s.phase for s in steps]).tobytes(),
    )
