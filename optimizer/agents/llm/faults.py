"""What can go wrong when a language model is asked, by kind, each with the sentence that names the mend."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping

import httpx
import openai

from optimizer.agents.llm.purse import Tokens
from optimizer.agents.llm.settings import PREFIX, LlmSettings

TOO_LONG = ("context_length", "context length", "maximum context", "context window", "too long", "too many tokens")
NO_MONEY = ("insufficient_quota", "billing", "credit")
LONGEST_WAIT_S = 300.0


class Stopped(Exception):
    """The search is over, or a person asked it to stop: nothing more is to be asked."""


class Fault(Exception):
    """A call that brought nothing. `again`: the same call may do better later, after `wait_s` when the server says so.
    `final`: no call will, until someone mends it. `tokens`: what was billed all the same.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        *,
        again: bool = False,
        final: bool = False,
        wait_s: float | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        super().__init__(text)
        self.kind, self.again, self.final, self.wait_s, self.tokens = kind, again, final, wait_s, tokens


def explain(error: Exception, settings: LlmSettings, sent: int) -> Fault:
    """The client's exception as a fault. The server's own words are quoted without the key.

    The `sent` tokens of a call that was given up count as spent: they may be billed though no answer came.
    """
    lost = Tokens(sent, 0, estimated=True)
    said = scrub(str(error), settings.key)
    where = f"The language model at {settings.host}"
    if isinstance(error, openai.APITimeoutError):
        return Fault("timeout", f"{where} did not answer within {settings.timeout_s:g} s.", again=True, tokens=lost)
    if isinstance(error, openai.APIStatusError):
        return _status(error.status_code, error.response.headers, f"{said} {error.code or ''}".strip(), where, settings)
    if isinstance(error, openai.APIConnectionError):
        return Fault("connection", f"{where} cannot be reached. Look at {PREFIX}BASE_URL.", again=True)
    return Fault("response", f"{where} sent something that is no chat completion: {said}", again=True, tokens=lost)


def _status(code: int, headers: httpx.Headers, said: str, where: str, settings: LlmSettings) -> Fault:
    low = said.lower()
    if code == 402 or (code == 429 and any(word in low for word in NO_MONEY)):
        return Fault("quota", f"{where} says that its account is used up: {said}", final=True)
    if code in (401, 403):
        mend = f"Put a key of that server into {PREFIX}API_KEY."
        return Fault("key", f"{where} refused the key (status {code}). {mend}", final=True)
    if code == 404:
        mend = f"Look at {PREFIX}MODEL and {PREFIX}BASE_URL."
        return Fault("model", f"{where} does not know the model {settings.model} (status 404). {mend}", final=True)
    if code == 429:
        return Fault("rate_limit", f"{where} limits how often it is asked.", again=True, wait_s=retry_after(headers))
    if code >= 500 or code in (408, 409):
        return Fault("server", f"{where} failed with status {code}.", again=True, wait_s=retry_after(headers))
    if any(word in low for word in TOO_LONG):
        return Fault("context", f"{where} takes less than was sent. Lower {PREFIX}CONTEXT_TOKENS. It said: {said}")
    return Fault("request", f"{where} refused the request (status {code}): {said}", final=True)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that the server asks to wait, or None. The header is a number of seconds or a date."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        date = email.utils.parsedate_tz(text) if text else None
        if date is None:
            return None
        seconds = email.utils.mktime_tz(date) - (time.time() if now is None else now)
    return min(max(0.0, seconds), LONGEST_WAIT_S)


def scrub(text: str, key: str) -> str:
    """`text` in one line, cut, without the key."""
    clean = " ".join(text.split())
    return (clean.replace(key, "[key]") if key else clean)[:300]
