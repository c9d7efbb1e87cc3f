"""What the language models of a run have used, and may use still: tokens and money, by agent, all attempts together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.agents.llm.settings import LlmSettings

KEPT_FIELDS = ("calls", "input_tokens", "cached_tokens", "output_tokens", "estimated_calls")


class CapReached(Exception):
    """The next call could cost more than the run may; the text is a sentence."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one call. `cached` are those of `sent` that the server had at hand; `estimated` when the server did not count."""

    sent: int
    answered: int
    cached: int = 0
    estimated: bool = False


@dataclass
class Usage:
    """Totals of one agent. `usd` is None where no price is known."""

    model: str
    usd: float | None
    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    estimated_calls: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    reserved: Tokens | None = None  # of a call that is under way

    def add(self, tokens: Tokens, usd: float | None) -> None:
        self.calls += 1
        self.input_tokens += tokens.sent
        self.cached_tokens += tokens.cached
        self.output_tokens += tokens.answered
        self.estimated_calls += tokens.estimated
        if self.usd is not None and usd is not None:
            self.usd += usd

    def failed(self, kind: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1


class Purse:
    """Shared by the language-model agents of a run. `on_change` stores an agent's totals before and after every call."""

    def __init__(self, settings: LlmSettings, on_change: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.settings, self.on_change = settings, on_change or (lambda payload: None)
        self.by_agent: dict[str, Usage] = {}
        self._lock = threading.Lock()

    def restore(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Totals that earlier attempts stored. A call that was cut off counts as spent: nobody knows what it cost."""
        for agent, row in stored.items():
            usage = Usage(str(row.get("model") or self.settings.model), self._nothing())
            for name in KEPT_FIELDS:
                setattr(usage, name, int(row.get(name) or 0))
            usage.failures = dict(row.get("failures") or {})
            if usage.usd is not None:
                usage.usd = float(row.get("usd") or 0.0)
            if row.get("reserved"):
                lost = Tokens(**row["reserved"])
                usage.add(lost, self.price(lost))
                usage.failed("interrupted")
            self.by_agent[agent] = usage

    def reserve(self, agent: str, sent: int, answered: int) -> None:
        """Sets aside the most that a call may take. Raises CapReached when that is more than is left."""
        tokens, settings = Tokens(sent, answered, estimated=True), self.settings
        with self._lock:
            usd, total = self.spent()
            for held in (u.reserved for u in self.by_agent.values() if u.reserved):
                usd, total = usd + (self.price(held) or 0.0), total + held.sent + held.answered
            if settings.priced and usd + (self.price(tokens) or 0.0) > settings.max_usd:
                raise CapReached(
                    f"${self.spent()[0]:.2f} of ${settings.max_usd:.2f} are spent and one more call could pass it."
                )
            if total + sent + answered > settings.max_tokens:
                raise CapReached(
                    f"{self.spent()[1]:,} of {settings.max_tokens:,} tokens are used and one more call could pass it."
                )
            self.of(agent).reserved = tokens
        self._tell(agent)

    def settle(self, agent: str, tokens: Tokens | None, failure: str = "") -> None:
        """What the call took in the end; None when it was refused before anything was computed."""
        with self._lock:
            usage = self.of(agent)
            usage.reserved = None
            if tokens is not None:
                usage.add(tokens, self.price(tokens))
            if failure:
                usage.failed(failure)
        self._tell(agent)

    def failed(self, agent: str, kind: str) -> None:
        """An answer that was paid for and could not be used."""
        with self._lock:
            self.of(agent).failed(kind)
        self._tell(agent)

    def spent(self) -> tuple[float, int]:
        """USD and tokens of all agents; USD is 0 where no price is known."""
        rows = self.by_agent.values()
        return sum(u.usd or 0.0 for u in rows), sum(u.input_tokens + u.output_tokens for u in rows)

    def price(self, tokens: Tokens) -> float | None:
        s = self.settings
        if s.usd_input is None or s.usd_output is None:
            return None
        cached = s.usd_input if s.usd_cached is None else s.usd_cached
        fresh = tokens.sent - tokens.cached
        return (fresh * s.usd_input + tokens.cached * cached + tokens.answered * s.usd_output) / 1e6

    def of(self, agent: str) -> Usage:
        return self.by_agent.setdefault(agent, Usage(self.settings.model, self._nothing()))

    def _nothing(self) -> float | None:
        return 0.0 if self.settings.priced else None

    def _tell(self, agent: str) -> None:
        usage = self.of(agent)
        held = usage.reserved
        row = {name: getattr(usage, name) for name in ("model", "usd", *KEPT_FIELDS)} | {
            "failures": dict(usage.failures)
        }
        row["reserved"] = {"sent": held.sent, "answered": held.answered, "estimated": True} if held else None
        self.on_change({"agent": agent} | row)
