"""Values as people read them: units always written, milliseconds only here, and a state as icon + word + tone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

DASH = "–"


class StateWord(NamedTuple):
    icon: str
    word: str
    tone: str  # ok, warn, bad, info or "" for neutral


STATES: dict[str, StateWord] = {
    # runs
    "queued": StateWord("clock", "Queued", ""),
    "running": StateWord("play", "Running", "info"),
    "succeeded": StateWord("check-circle", "Succeeded", "ok"),
    "no_gain": StateWord("minus-circle", "Nothing better found", "info"),
    "failed": StateWord("x-circle", "Failed", "bad"),
    "cancelled": StateWord("stop", "Cancelled", ""),
    "cancelling": StateWord("stop", "Cancelling", "warn"),
    # candidates
    "keep": StateWord("check-circle", "Keep", "ok"),
    "marginal": StateWord("info", "Marginal", "info"),
    "retest": StateWord("refresh", "Retest", "warn"),
    "discard": StateWord("minus-circle", "Discard", ""),
    "duplicate": StateWord("minus-circle", "Same as an earlier one", ""),
    "predicted": StateWord("lightbulb", "Predicted only", ""),
    "proposed": StateWord("lightbulb", "Proposed", ""),
    "built": StateWord("flask", "Built", ""),
    # checks
    "pass": StateWord("check", "Pass", "ok"),
    "fail": StateWord("x", "Fail", "bad"),
    "inconclusive": StateWord("question", "Inconclusive", "warn"),
    "not_applicable": StateWord("minus-circle", "Not applicable", ""),
    # approvals
    "pending": StateWord("clock", "Waiting for a decision", "warn"),
    "waiting": StateWord("clock", "Waiting for a decision", "warn"),
    "approved": StateWord("check-circle", "Approved", "ok"),
    "declined": StateWord("x-circle", "Declined", "bad"),
    "void": StateWord("minus-circle", "Void", ""),
    # rollouts and versions
    "canary": StateWord("branch", "Canary", "info"),
    "hold": StateWord("pause", "On hold", "warn"),
    "paused": StateWord("pause", "Paused", "warn"),
    "promoted": StateWord("check-circle", "Promoted", "ok"),
    "promoting": StateWord("refresh", "Promoting", "info"),
    "returning": StateWord("undo", "Rolling back", "warn"),
    "done": StateWord("check-circle", "Serving", "ok"),
    "rollout": StateWord("branch", "Rolling out", "info"),
    "aborted": StateWord("x-circle", "Aborted", "bad"),
    "rolled_back": StateWord("undo", "Rolled back", "warn"),
    "stable": StateWord("check-circle", "Serving", "ok"),
    "serving": StateWord("check-circle", "Serving", "ok"),
    "live": StateWord("check-circle", "Serving", "ok"),
    "retired": StateWord("minus-circle", "Retired", ""),
    "candidate": StateWord("flask", "Candidate", ""),
    "ready": StateWord("check-circle", "Ready", "ok"),
    "starting": StateWord("clock", "Starting", "info"),
    "down": StateWord("x-circle", "Down", "bad"),
    "offline": StateWord("x-circle", "Offline", "bad"),
    "unknown": StateWord("question", "Unknown", "warn"),
    "optimising": StateWord("bolt", "Optimising", "info"),
    # audit chain
    "intact": StateWord("shield", "Chain intact", "ok"),
    "broken": StateWord("alert", "Chain broken", "bad"),
}

PHASES = (
    ("queued", "Queued"),
    ("profile", "Profile"),
    ("search", "Search"),
    ("verify", "Verify"),
    ("measure", "Measure"),
    ("report", "Report"),
)

PROVENANCES = {  # of an estimate; `{seen}`: measurements of its mechanism
    "fitted": "corrected by {seen} measurements of this mechanism",
    "roofline": "roofline",
    "extrapolated": "outside what was measured",
    "unvalidated": "unvalidated",
}
POST_WORDS: dict[str, StateWord] = {
    "claim": StateWord("flask", "Claims", ""),
    "result": StateWord("check-circle", "Measured", "ok"),
    "insight": StateWord("lightbulb", "Found", "info"),
    "dead_end": StateWord("x-circle", "Dead end", "bad"),
    "question": StateWord("question", "Asks", "warn"),
    "answer": StateWord("chat", "Answers", "info"),
}


def provenance(key: Any, seen: Any) -> str:
    """What stands behind an estimate; nothing for one that does not say."""
    return PROVENANCES.get(str(key), "").format(seen=int(number(seen) or 0))


def state_word(value: Any) -> StateWord:
    """The state's icon, word and tone; an unknown value is shown as it is, never hidden."""
    key = str(value or "unknown").lower()
    return STATES.get(key) or StateWord("dot", key.replace("_", " ").capitalize(), "")


def post_word(kind: Any) -> StateWord:
    """What an agent does with a post of this kind; an unknown kind is shown as it is."""
    return POST_WORDS.get(str(kind)) or StateWord("dot", str(kind or "").replace("_", " ").capitalize(), "")


def number(value: Any) -> float | None:
    """`value` as a finite float, or None."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant figures, thousands grouped, never in exponent form."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def millis(seconds: Any) -> str:
    """Seconds as milliseconds, or as seconds from ten of them on."""
    value = number(seconds)
    if value is None:
        return DASH
    return f"{significant(value)} s" if abs(value) >= 10 else f"{significant(value * 1e3)} ms"


def duration(seconds: Any) -> str:
    """`4 min 12 s`, `1 h 03 min`, `38 s`, `0.4 s`."""
    value = number(seconds)
    if value is None:
        return DASH
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def times(ratio: Any, digits: int = 2) -> str:
    value = number(ratio)
    return DASH if value is None else f"{value:.{digits}f}×"


def interval(low: Any, high: Any) -> str:
    a, b = number(low), number(high)
    return DASH if a is None or b is None else f"{a:.2f}–{b:.2f}×"


def usd(value: Any) -> str:
    found = number(value)
    if found is None:
        return DASH
    return f"${found:,.2f}" if abs(found) >= 0.1 or found == 0 else f"${significant(found, 2)}"


def percent(share: Any, digits: int = 0) -> str:
    value = number(share)
    return DASH if value is None else f"{100 * value:.{digits}f}%"


def signed_percent(ratio: Any) -> str:
    """A ratio as a change: 1.42 is `+42%`, 0.9 is `−10%`."""
    value = number(ratio)
    if value is None:
        return DASH
    change = 100 * (value - 1)
    return f"{'+' if change >= 0 else '−'}{abs(change):.0f}%"


def measured(value: Any) -> str:
    """A check's value or limit: an integer stays one; small numbers keep three figures."""
    found = number(value)
    if found is None:
        return DASH
    if found == int(found) and abs(found) < 1e9:
        return f"{int(found):,}"
    return significant(found) if abs(found) >= 1e-4 else f"{found:.1e}"
