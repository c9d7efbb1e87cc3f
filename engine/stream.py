"""From token ids to text that can be sent: whole characters only, nothing past a stop string. Torch-free."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.models.tokenizer import Tokenizer


class TextStream:
    """Text of one choice. Text that may be the start of a stop string, and bytes that may be part of a character, wait.

    Stop strings count from the `min_tokens`th token on. What is pushed joins to the tokenizer's decoding of it all, but
    for a character of which the end never came.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._longest = max((len(s) for s in self._stop), default=0)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._tokens = 0
        self._first = tokenizer.drops_first_space
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, last: bool = False) -> str:
        """Text to send after one more token. Sets `stopped` once a stop string is complete: nothing comes after."""
        if self.stopped:
            return ""
        self._tokens += 1
        raw = self._tokenizer.token_bytes(token_id)
        if self._first and raw:
            raw, self._first = raw.removeprefix(b" "), False
        return self._filter(self._decode(raw), last)

    def finish(self) -> str:
        """What still waits when the choice ends without a further token."""
        return "" if self.stopped else self._filter("", True)

    def _filter(self, new: str, last: bool) -> str:
        if not self._stop:
            return new
        text = self._held + new
        counting = self._tokens >= self._min_tokens
        found = [(text.index(s) + len(s), text.index(s)) for s in self._stop if counting and s in text]
        if found:
            end, start = min(found)  # the one that is complete first, however the text was cut into tokens
            self.stopped, self._held = True, ""
            return text[: end if self._include_stop else start]
        keep = 0 if last else self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop):
                return n
        return 0
