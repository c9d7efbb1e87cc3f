"""The one error that anything wrong with a model folder becomes."""

from __future__ import annotations


class ModelError(Exception):
    """`code` is stable, `message` says what is wrong with which file, `mend` what to do about it."""

    def __init__(self, code: str, message: str, mend: str = "") -> None:
        super().__init__(f"{message} {mend}".strip())
        self.code, self.message, self.mend = code, message, mend
