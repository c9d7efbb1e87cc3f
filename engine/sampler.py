"""From logits to tokens, one row at a time where a row asks for more than the greedy token. No state between steps.

The random number of a row depends on its seed and the index of the token alone, so a request's tokens do not depend on who
shares its batch.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from engine.wire import SampleRow, StepDone

UNREAD = -1


def sample(logits: Tensor, rows: list[SampleRow]) -> StepDone:
    """Float32 `logits` [R, vocab] and R rows -> chosen ids, their logprobs (NaN where not asked for), alternatives.

    A row that follows a draft which the row before did not draw gets the id -1 (`engine.speculate`).
    Logprobs are of the model's own distribution, before temperature and filters, after bias and penalties.
    """
    greedy = logits.argmax(-1).tolist()
    tokens, logprobs, tops = [], [], []
    for i, row in enumerate(rows):
        if row.follows >= 0 and tokens[-1] != row.follows:  # nobody reads it, nor what follows it
            tokens.append(UNREAD)
            logprobs.append(math.nan)
            tops.append([])
            continue
        plain = not (row.banned or row.logit_bias or _penalised(row))
        if plain and row.temperature <= 0 and row.logprobs < 0:
            tokens.append(greedy[i])
            logprobs.append(math.nan)
            tops.append([])
            continue
        scores = logits[i] if plain else adjust(logits[i].clone(), row)
        token = int(scores.argmax()) if row.temperature <= 0 else draw(scores, row)
        tokens.append(token)
        logprob, top = _logprobs(scores, token, row.logprobs)
        logprobs.append(logprob)
        tops.append(top)
    return StepDone(token_ids=tokens, logprobs=logprobs, top=tops)


def adjust(scores: Tensor, row: SampleRow) -> Tensor:
    """Penalties, bias and bans, in place. Repetition (CTRL, section 4.1) counts prompt and output; the others the output."""
    output = torch.from_numpy(np.frombuffer(row.output_ids, np.int32).astype(np.int64))
    if row.repetition_penalty != 1.0:
        prompt = torch.from_numpy(np.frombuffer(row.prompt_ids, np.int32).astype(np.int64))
        seen = torch.unique(torch.cat([prompt, output]))
        value = scores[seen]
        scores[seen] = torch.where(value > 0, value / row.repetition_penalty, value * row.repetition_penalty)
    if (row.presence_penalty or row.frequency_penalty) and output.numel():
        seen, count = torch.unique(output, return_counts=True)
        scores[seen] -= row.presence_penalty + row.frequency_penalty * count.to(scores.dtype)
    for token, bias in row.logit_bias.items():
        scores[token] += bias
    if row.banned:
        scores[torch.tensor(row.banned)] = -math.inf
    return scores


def draw(scores: Tensor, row: SampleRow) -> int:
    """One token from the tempered, filtered distribution by inverse transform over descending probabilities."""
    probabilities, order = torch.softmax(scores.double() / row.temperature, -1).sort(descending=True, stable=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if row.top_k > 0:
        keep[row.top_k :] = False
    if row.min_p > 0:
        keep &= probabilities >= row.min_p * probabilities[0]
    if row.top_p < 1:
        kept = probabilities * keep
        before = (kept.cumsum(-1) - kept) / kept.sum()
        keep &= before < row.top_p
    keep[0] = True
    cumulative = (probabilities * keep).cumsum(-1)
    place = int(torch.searchsorted(cumulative, uniform(row.seed, row.draw) * cumulative[-1], right=True))
    last = int(keep.nonzero()[-1])
    return int(order[min(place, last)])


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) named by seed and index: a counter-based generator, so that no state is kept."""
    named = (seed % (1 << 64)).to_bytes(8, "little") + index.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 11) / float(1 << 53)


def _penalised(row: SampleRow) -> bool:
    return row.repetition_penalty != 1.0 or row.presence_penalty != 0.0 or row.frequency_penalty != 0.0


def _logprobs(scores: Tensor, token: int, wanted: int) -> tuple[float, list[tuple[int, float]]]:
    if wanted < 0:
        return math.nan, []
    logprobs = torch.log_softmax(scores, -1)
    values, ids = (
        logprobs.topk(min(wanted, len(logprobs))) if wanted else (torch.empty(0), torch.empty(0, dtype=torch.long))
    )
    return float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True))
