"""What pruning by prediction would have cost: a recorded landscape, searched again and again with the worse half thrown away.

`replay_pruning` draws its searches at random; `prune_moments` takes them as they went, with the predictions of each moment.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pruning:
    """Of replayed searches. `lost`: the best that would have been found was thrown away. `gain_kept`: of its ratio, on average.
    `pruned`: the share of all programs that was thrown away.
    """

    searches: int
    lost: int
    gain_kept: float
    pruned: float

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
    return Pruning(searches, lost, kept_gain, 1 - len(kept) / size)


@dataclass(frozen=True, slots=True)
class Moment:
    """A program when its turn came in a search: how many of the `known` ones, itself included, were predicted better then."""

    better: int
    known: int
    measured: float

    def kept(self, keep: float = 0.5) -> bool:
        """Whether it is among the best predicted; the first always is. Equal predictions are not told apart."""
        return self.better < max(1.0, keep * self.known)


def prune_moments(searches: Sequence[Sequence[Moment]], keep: float = 0.5, noise: float = 0.0) -> Pruning:
    """Each search once more without what was not among the `keep` best at its moment; lost as in `replay_pruning`.

    Raises ValueError for no search, or for one that measured nothing.
    """
    if not searches or not all(searches):
        raise ValueError("a replay needs searches, each of one program or more")
    shares = []
    for moments in searches:
        kept = [m.measured for m in moments if m.kept(keep)]
        shares.append(max(kept, default=0.0) / max(m.measured for m in moments))
    pruned = sum(not m.kept(keep) for moments in searches for m in moments) / sum(map(len, searches))
    return Pruning(len(searches), sum(s < 1 - noise for s in shares), sum(shares) / len(shares), pruned)
