"""How far apart two sets of logits are. Numpy only; rows are positions, columns the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROWS_AT_ONCE = 64
MARGIN = 0.5  # nats between the reference's first and second choice from where its top token must be met


@dataclass(frozen=True, slots=True)
class Distance:
    """From a reference's logits. `agree`: share of equal top tokens in the `margin_rows` where that one is sure."""

    rows: int
    mean_kl: float
    max_kl: float
    agree: float
    margin_rows: int
    p99_change: float  # 99th percentile over rows of the largest change of any token's probability


def same_bits(a: np.ndarray, b: np.ndarray) -> int:
    """How many values differ in any bit (NaN payloads and signed zeros count)."""
    if a.shape != b.shape:
        return max(a.size, b.size)
    return int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def distance(reference: np.ndarray, logits: np.ndarray) -> Distance:
    """KL(reference || logits) and its company. Raises ValueError for shapes that differ."""
    if reference.shape != logits.shape:
        raise ValueError(f"logits {logits.shape} are compared with {reference.shape}")
    kl, change, sure, agree = [], [], 0, 0
    for start in range(0, len(reference), ROWS_AT_ONCE):
        # float64: a row's KL is far below what float32 sums over a large vocabulary can tell
        p = log_softmax(reference[start : start + ROWS_AT_ONCE].astype(np.float64))
        q = log_softmax(logits[start : start + ROWS_AT_ONCE].astype(np.float64))
        weight = np.exp(p)
        kl.append((weight * (p - q)).sum(-1))
        change.append(np.abs(weight - np.exp(q)).max(-1))
        second, first = np.partition(p, -2, axis=-1)[:, -2:].T
        certain = first - second > MARGIN
        sure += int(certain.sum())
        agree += int((certain & (p.argmax(-1) == q.argmax(-1))).sum())
    kls, changes = np.maximum(np.concatenate(kl), 0.0), np.concatenate(change)
    return Distance(
        len(kls),
        float(kls.mean()),
        float(kls.max()),
        agree / sure if sure else 1.0,
        sure,
        float(np.quantile(changes, 0.99)),
    )


class Screen:
    """A reference's logits [rows, vocab], kept ready to be compared with many candidates'."""

    def __init__(self, logits: np.ndarray) -> None:
        self.log_p = log_softmax(logits.astype(np.float64))
        self.p = np.exp(self.log_p)
        second, first = np.partition(self.log_p, -2, axis=-1)[:, -2:].T
        self.sure, self.top = first - second > MARGIN, self.log_p.argmax(-1)

    def compare(self, logits: np.ndarray) -> tuple[float, float, int]:
        """(mean KL, share of equal top tokens in sure rows, sure rows). Raises ValueError for shapes that differ."""
        if logits.shape != self.log_p.shape:
            raise ValueError(f"logits {logits.shape} are compared with {self.log_p.shape}")
        kl = np.maximum((self.p * (self.log_p - log_softmax(logits.astype(np.float64)))).sum(-1), 0.0)
        sure = int(self.sure.sum())
        equal = int((self.sure & (logits.argmax(-1) == self.top)).sum())
        return float(kl.mean()), equal / sure if sure else 1.0, sure


def perplexity(logits: np.ndarray, targets: np.ndarray) -> float:
    """Of the `targets` that followed each row."""
    chosen = [
        log_softmax(logits[i : i + ROWS_AT_ONCE].astype(np.float64))[
            np.arange(len(targets[i : i + ROWS_AT_ONCE])), targets[i : i + ROWS_AT_ONCE]
        ]
        for i in range(0, len(targets), ROWS_AT_ONCE)
    ]
    return float(np.exp(-np.concatenate(chosen).mean()))
