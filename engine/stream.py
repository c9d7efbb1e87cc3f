"""From token ids to text that can be sent: whole characters only, nothing past a stop string. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from engine.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
PATIENCE = 8  # tokens a split character may take before what there is goes out as it is


class TextStream:
    """Text of one choice. `push` returns what may be sent now; text that may be the start of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._read = 0  # tokens whose text has been taken
        self._prefix = 0  # a few tokens earlier, decoded along so that spaces between tokens come out right
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, last: bool = False) -> str:
        """Text to send after one more token. Sets `stopped` once a stop string is complete; nothing comes after that."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._filter(self._take(last), last)

    def finish(self) -> str:
        """What is still held back when the choice ends without a further token."""
        if self.stopped:
            return ""
        return self._filter(self._take(True), True)

    def _take(self, last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        text = self._tokenizer.decode(self._ids[self._prefix :])
        waiting = len(self._ids) - self._read
        if text.endswith(REPLACEMENT) and not last and waiting < PATIENCE:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _filter(self, new: str, last: bool) -> str:
        text = self._held + new
        if not self._stop:
            return text
        found = [(text.index(s), s) for s in self._stop if s in text]
        if found:
            place, stop = min(found)
            self.stopped, self._held = True, ""
            return text[: place + len(stop)] if self._include_stop else text[:place]
        keep = 0 if last else self._possible_start(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(len(s) for s in self._stop) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop):
                return n
        return 0
