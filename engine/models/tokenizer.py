"""Text to token ids and back, and a model's chat template. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from engine.models.config import read_config
from engine.models.errors import ModelError

WORD_START = "\u2581"


def _byte_letters() -> dict[str, int]:
    """The letters byte-level BPE writes bytes with: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_letters()


class ChatError(ValueError):
    """The messages do not fit the model's chat template."""


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ModelError when its files are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                "missing_tokenizer", f"{folder} has no tokenizer.json.", "Copy it from the model's source."
            )
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError("tokenizer_damaged", f"{path} cannot be read: {error}.", "Copy the file again.") from error
        self._config = self._read_described(Path(folder))
        self._template_text = self._read_template(Path(folder))
        self._environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: date.today().strftime(form),
        }
        self._template = self._environment.from_string(self._template_text) if self._template_text else None
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        decoder = self._tokenizer.decoder
        self._byte_level = decoder is not None and "ByteLevel" in str(decoder)
        self.drops_first_space = not self._byte_level  # SentencePiece marks the start of a text like that of a word
        config = read_config(folder)
        self.vocab_size = config.vocab_size
        self.eos_ids = self._eos_ids(config.eos_token_ids)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str:
        """The text of one token, with a replacement character where it is part of one."""
        return self.decode([token_id], skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, as bytes: a character may be split over tokens. Empty for special tokens."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # the vocabulary may be padded
            return b""
        if self._byte_level:
            known = all(c in BYTE_OF for c in piece)
            return bytes(BYTE_OF[c] for c in piece) if known else piece.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(WORD_START, " ").encode()

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    def chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises ChatError when the model has no template or refuses the messages."""
        if self._template is None:
            raise ChatError("this model has no chat template; use /v1/completions")
        special = {k: _text(self._config.get(k)) for k in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **special)
        except TemplateError as error:
            raise ChatError(f"the chat template refused these messages: {error}") from error

    def _eos_ids(self, configured: tuple[int, ...]) -> tuple[int, ...]:
        named = self._tokenizer.token_to_id(_text(self._config.get("eos_token")) or "")
        return tuple(dict.fromkeys([*configured, *([] if named is None else [named])]))

    @staticmethod
    def _read_described(folder: Path) -> dict[str, Any]:
        path = folder / "tokenizer_config.json"
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text()))
        except ValueError as error:
            raise ModelError("tokenizer_damaged", f"{path} cannot be read: {error}.", "Copy the file again.") from error

    def _read_template(self, folder: Path) -> str:
        path = folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        template = self._config.get("chat_template") or ""
        if isinstance(template, list):  # several named templates: the default one
            template = next((t["template"] for t in template if t.get("name") == "default"), "")
        return str(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
