"""Times as sums of physical terms with positive coefficients, fitted to logs of measured times, robustly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prior:
    """Where coefficients start, how far they may go, and how strongly their logs are drawn back. [terms] each."""

    start: Floats
    least: Floats
    most: Floats
    pull: float


def fit_positive(
    terms: Floats,
    measured: Floats,
    prior: Prior,
    votes: Floats | None = None,
    groups: Floats | None = None,
    group_pull: float = 0.6,
    scale: float = 0.2,
) -> tuple[Floats, Floats]:
    """(coefficients [terms], factors [groups]) such that `terms @ coefficients * factor` is close to `measured` [points].

    `groups` [points, groups] holds a 1 where a point belongs to a group, which then has a factor of its own, drawn to 1 by
    `group_pull`. Errors of logs beyond `scale` count by their root.
    """
    n = terms.shape[1]
    member = np.zeros((len(terms), 0)) if groups is None else groups
    root, extra, target = np.sqrt(np.ones(len(terms)) if votes is None else votes), member.shape[1], np.log(measured)
    least = np.concatenate([np.log(prior.least), np.full(extra, -1.5)])
    most = np.concatenate([np.log(prior.most), np.full(extra, 1.5)])
    origin = np.clip(np.concatenate([np.log(prior.start), np.zeros(extra)]), least + 1e-3, most - 1e-3)
    pulls = np.diag(np.concatenate([np.full(n, prior.pull), np.full(extra, group_pull)]))

    def residuals(x: Floats) -> Floats:
        off = np.log(terms @ np.exp(x[:n])) + member @ x[n:] - target
        return np.concatenate([root * off, pulls @ (x - origin)])

    def jacobian(x: Floats) -> Floats:
        parts = terms * np.exp(x[:n])
        slopes = np.concatenate([parts / parts.sum(1, keepdims=True), member], axis=1)
        return np.concatenate([root[:, None] * slopes, pulls])

    found = least_squares(residuals, origin, jacobian, (least, most), loss="soft_l1", f_scale=scale, max_nfev=400).x
    return np.exp(found[:n]), np.exp(found[n:])
