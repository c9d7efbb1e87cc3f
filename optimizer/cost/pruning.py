"""What pruning by prediction would have cost: a recorded landscape, searched again and again with the worse half thrown away."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pruning:
    """Of replayed searches. `lost`: the best that would have been found was thrown away. `gain_kept`: of its ratio, on average."""

    searches: int
    lost: int
    gain_kept: float

    @property
    def lost_share(self) -> float:
        return self.lost / self.searches


def replay_pruning(
    predicted: Sequence[float],
    measured: Sequence[float],
    searches: int = 50,
    budget: int = 0,
    keep: float = 0.5,
    noise: float = 0.0,
    seed: int = 1,
) -> Pruning:
    """Each search sees `budget` programs of the landscape (0: two thirds of it) and measures only the `keep` best predicted.

    `predicted` and `measured` are speeds over the baseline, program by program. A winner is lost when what is left is more
    than `noise` (a share) slower: two programs that measurement cannot tell apart are one winner. Raises ValueError.
    """
    if len(predicted) != len(measured) or len(measured) < 4:
        raise ValueError(
            f"{len(predicted)} predictions and {len(measured)} measurements: give four or more of both, paired"
        )
    if not (0 < keep <= 1 and searches > 0 and budget <= len(measured) and all(m > 0 for m in measured)):
        raise ValueError("a replay needs searches, a share to keep, a budget within the landscape and speeds above 0")
    rng, size = random.Random(seed), budget or max(2, 2 * len(measured) // 3)
    lost, kept_gain = 0, 0.0
    for _ in range(searches):
        seen = rng.sample(range(len(measured)), size)
        kept = sorted(seen, key=lambda i: predicted[i], reverse=True)[: max(1, round(keep * size))]
        share = max(measured[i] for i in kept) / max(measured[i] for i in seen)
        lost += share < 1 - noise
        kept_gain += share / searches
    return Pruning(searches, lost, kept_gain)
