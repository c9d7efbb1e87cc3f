"""Which model is asked, where, with which key, and what it may cost. The key comes from the environment and goes nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from optimizer.config import ConfigError

PREFIX = "POLYMORPH_LLM_"
OPENAI = "https://api.openai.com/v1"
NUMBERS: Mapping[str, tuple[str, float]] = {  # environment variable -> field and the least it may be
    "USD_PER_M_INPUT": ("usd_input", 0.0),
    "USD_PER_M_CACHED": ("usd_cached", 0.0),
    "USD_PER_M_OUTPUT": ("usd_output", 0.0),
    "MAX_USD": ("max_usd", 0.0),
    "MAX_TOKENS": ("max_tokens", 1.0),
    "CONTEXT_TOKENS": ("context_tokens", 16384.0),
    "ANSWER_TOKENS": ("answer_tokens", 1024.0),
    "TIMEOUT_S": ("timeout_s", 1.0),
    "AGENTS": ("agents", 1.0),
}
UNPRICED = (
    f"A cap in USD needs prices: set {PREFIX}USD_PER_M_INPUT and {PREFIX}USD_PER_M_OUTPUT (USD for a million tokens; 0 for "
    "a model of your own)."
)
WHOLE = frozenset({"max_tokens", "context_tokens", "answer_tokens", "agents"})
MOST_AGENTS = 8
PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """Prices in USD for a million tokens, None where they are not known: then only the cap on tokens holds.

    Caps are of a whole run, all agents and attempts together. `context_tokens` is what the model takes in and gives out
    in one call, `answer_tokens` the part of it that is left to the answer.
    """

    model: str
    base_url: str = OPENAI
    key: str = field(default="", repr=False)
    usd_input: float | None = None
    usd_cached: float | None = None
    usd_output: float | None = None
    max_usd: float = 1.0
    max_tokens: int = 1_000_000
    context_tokens: int = 48_000
    answer_tokens: int = 12_000
    timeout_s: float = 180.0
    agents: int = 1

    def __post_init__(self) -> None:
        address = urlsplit(self.base_url)
        checks = (
            (
                address.scheme in ("http", "https") and bool(address.hostname),
                f"{PREFIX}BASE_URL {self.base_url!r} is no address: write it as {OPENAI}.",
            ),
            (
                not (address.username or address.password or address.query),
                f"{PREFIX}BASE_URL carries a name, password or query. Put the key into {PREFIX}API_KEY instead.",
            ),
            (
                (self.usd_input is None) == (self.usd_output is None),
                f"{PREFIX}USD_PER_M_INPUT and {PREFIX}USD_PER_M_OUTPUT belong together: set both, or neither.",
            ),
            (
                2 * self.answer_tokens <= self.context_tokens,
                f"{PREFIX}ANSWER_TOKENS is more than half of {PREFIX}CONTEXT_TOKENS: nothing could be asked. Lower it.",
            ),
            (self.agents <= MOST_AGENTS, f"{PREFIX}AGENTS is {self.agents}: at most {MOST_AGENTS} are asked at once."),
        )
        for ok, message in checks:
            if not ok:
                raise ConfigError(message)

    @property
    def priced(self) -> bool:
        return self.usd_input is not None

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).netloc

    @property
    def caps(self) -> str:
        tokens = f"{self.max_tokens:,} tokens"
        return f"${self.max_usd:.2f} and {tokens}" if self.priced else f"{tokens} (no price is set)"

    @property
    def offer(self) -> dict[str, Any] | None:
        """What a page may say of the model; None without prices, since a cap in money would mean nothing."""
        return {"model": self.model, "host": self.host, "max_usd": self.max_usd} if self.priced else None

    @classmethod
    def read(cls, environ: Mapping[str, str], chosen: Mapping[str, Any] | None = None) -> LlmSettings | None:
        """From the environment, `chosen` (a run's own: `RunConfig.llm`) above it. None when neither names a model.

        Raises ConfigError for a value that cannot be used.
        """
        values: dict[str, Any] = {}
        for variable, (name, least) in NUMBERS.items():
            text = environ.get(PREFIX + variable, "").strip()
            if text:
                values[name] = _number(PREFIX + variable, text, name in WHOLE, least)
        for name in ("model", "base_url"):
            if environ.get(PREFIX + name.upper()):
                values[name] = environ[PREFIX + name.upper()].strip()
        values |= {name: value for name, value in (chosen or {}).items() if value}
        if not values.get("model"):
            return None
        return cls(key=environ.get(f"{PREFIX}API_KEY", "").strip(), **values)


def conceal_environment() -> None:
    """Closes this process's memory and first environment to others of its user: candidates run as that user, and the key
    stands there. Root's processes with tracing rights can look all the same. Linux only; elsewhere it does nothing.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _number(variable: str, text: str, whole: bool, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}: give a number.") from None
    if not least <= value < float("inf"):
        raise ConfigError(f"{variable} is {text}: give a number of at least {least:g}.")
    return int(value) if whole else value
