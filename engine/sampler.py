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
    """One token of float32 `scores` [vocab], tempered and filtered, by inverse transform over the kept ids as they rise.

    In the order of the ids the cumulative weights move as little as the scores do; in the order of the weights two tokens
    within rounding change places. So equal seeds draw alike in versions that differ in rounding alone.
    """
    peak = float(scores.max())
    if peak == -math.inf:  # every token is banned: none is better than another
        return 0
    ids, weights = kept(scores, row, peak)
    cumulative = weights.cumsum(-1)
    total = float(cumulative[-1])
    aim = min(
        uniform(row.seed, row.draw) * total, math.nextafter(total, 0.0)
    )  # under the total, however it was rounded
    return int(ids[torch.searchsorted(cumulative, aim, right=True)])  # lifts the sum over `aim`: its weight is not 0


def kept(scores: Tensor, row: SampleRow, peak: float) -> tuple[Tensor, Tensor]:
    """What top-k, min-p and top-p leave, in this order: rising ids [n] and their float64 weights, 1 for a score of `peak`.

    Of equals the lower id comes first: of scores in top-k, of weights in the nucleus.
    Nothing is sorted but what may lie in the nucleus.
    """
    ids = torch.arange(len(scores))
    if 0 < row.top_k < len(scores):
        ids = _first(scores, row.top_k)
        scores = scores[ids]
    weights = scores.double().sub_(peak).div_(row.temperature).exp_()  # the softmax but for a factor
    if row.min_p > 0:
        fit = weights >= row.min_p
        ids, weights = ids[fit], weights[fit]
    if row.top_p < 1:
        inside = _nucleus(weights, row.top_p)
        ids, weights = ids[inside], weights[inside]
    return ids, weights


def _first(scores: Tensor, count: int) -> Tensor:
    """Rising ids of the `count` highest scores."""
    last = scores.topk(count, sorted=False).values.min()
    above, level = (scores > last).nonzero().view(-1), (scores == last).nonzero().view(-1)
    return torch.cat([above, level[: count - len(above)]]).sort().values


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Rising places of the fewest greatest weights whose share reaches `top_p` (Holtzman et al., 2020), at least one.

    The weights under (1 - top_p) total / n sum to less than what a nucleus may leave out, so none of them lies in it;
    half of that, so that rounding does not matter. A flat distribution stays whole and is sorted.
    """
    total = float(weights.sum())
    possible = (weights >= 0.5 * (1 - top_p) * total / len(weights)).nonzero().view(-1)
    values, order = weights[possible].sort(descending=True, stable=True)
    short = int(torch.searchsorted(values.cumsum(-1), top_p * total))  # so many do not reach the share yet
    return possible[order[: short + 1]].sort().values


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
