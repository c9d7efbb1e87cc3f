"""Speculative decoding without a second model: drafts are looked up in the request's own text. Torch-free.

A step gives a decoding sequence its last token and k drafts as query rows and asks for the logits of each. Every row is
sampled as if the drafts before it held, and its token is kept while they do: `accepted` drafts and one token more.

Why that is exact. Leviathan et al. (2023, algorithm 1) and Chen et al. (2023, algorithm 2) accept a draft d, drawn from q,
with probability min(1, p(d) / q(d)) and else draw from max(0, p - q), renormalised. A draft that was looked up has
q(d) = 1: it is accepted with probability p(d), and else a token comes from p without d, renormalised. Drawing x from p and
comparing it with d is the same law, whatever temperature, filters, penalties and bias made p. It takes one random number a
token, the one that token has without drafts, so a seeded request draws the same tokens with drafts and without.

The same to the bit only for a forward pass whose rows do not depend on how many share the step. Most are not so: bfloat16
logits that lie within rounding of each other may change places when a step has more rows, with drafts as with neighbours.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from engine.sequence import ID_BYTES, Sequence

SHORTEST_MATCH = 2  # one token alone says little about what follows it

Drafter = Callable[
    [Sequence, int], Tokens[int]
]  # a sequence and the most drafts it may have -> its next tokens, guessed


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Drafts what followed the last time that the sequence's end was said (prompt lookup: Saxena, 2023).

    Ends of `ngram` tokens are looked for first, then shorter ones; of several places the latest counts.
    """

    ngram: int

    def __call__(self, sequence: Sequence, most: int) -> list[int]:
        """At most `most` token ids, none when the end is new."""
        text = sequence.packed()
        for n in range(min(self.ngram, sequence.length - 1), min(self.ngram, SHORTEST_MATCH) - 1, -1):
            place = _last_place(text, n)
            if place >= 0:
                return _copied(text, place + n, most)
        return []


def accepted(drafts: Tokens[int], drawn: Tokens[int]) -> int:
    """How many leading drafts their rows drew as well. `drawn` holds a token for each draft and one more."""
    return next((i for i, draft in enumerate(drafts) if drawn[i] != draft), len(drafts))


def _last_place(text: bytearray, n: int) -> int:
    """Index of the token at which the last `n` tokens stood before, the latest such; -1 for nowhere."""
    end, needle = len(text) - ID_BYTES, bytes(text[-n * ID_BYTES :])
    while (at := text.rfind(needle, 0, end)) % ID_BYTES and at >= 0:  # a match across two ids is none
        end = at + len(needle) - 1
    return at // ID_BYTES


def _copied(text: bytearray, start: int, most: int) -> list[int]:
    """The tokens from index `start`; past the end the copy reads on in itself, so that a loop goes on as a loop."""
    known = array("i", bytes(text[start * ID_BYTES : (start + most) * ID_BYTES])).tolist()
    return [known[i % len(known)] for i in range(most)]
