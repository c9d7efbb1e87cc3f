"""A run's accounting in words, for terminals and pages alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

BADGES = {
    "measured": "measured",
    "fitted": "fitted on measurements of this machine",
    "roofline": "roofline of this machine's ceilings",
    "estimated": "estimated from specifications",
    "extrapolated": "outside what was measured",
    "unvalidated": "unvalidated",
}


def sentences(accounting: Mapping[str, Any], time_lost: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the figures say, one sentence each; nothing is said of what was not counted."""
    kept, look = accounting["kept"], accounting["one_look"]
    found = [_device(accounting), _kept(kept)]
    if look["claimed"]:
        found.append(
            f"Timed once beside its rival, {_many(look['claimed'], 'program')} seemed faster; timed until it was clear, "
            f"{look['held']} of them were: {look['false_share']:.0%} of single looks would have been false wins."
        )
    if winner := accounting["winner"]:
        found.append(_winner(winner))
    found += [_prediction(row) for row in accounting["predictions"]]
    if time_lost:
        found.append("Time lost: " + ", ".join(f"{t['seconds']:.1f} s {t['why']}" for t in time_lost) + ".")
    if (usd := accounting["language_models_usd"]) is not None:
        found.append(f"Language models cost ${usd:.4f}.")
    return found


def stages_table(accounting: Mapping[str, Any]) -> Table:
    table = Table(title="Where the time went", title_justify="left")
    for column in ("stage", "candidates", "seconds"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for row in accounting["stages"]:
        count = "-" if row["count"] is None else str(row["count"])
        table.add_row(f"{row['title']}: {row['what']}", count, f"{row['seconds']:,.1f}")
    return table


def _device(accounting: Mapping[str, Any]) -> str:
    rate = accounting["distinct_per_device_hour"]
    many = "none" if rate is None else f"{rate:.0f} distinct programs"
    return (
        f"The device was held for {accounting['device_s']:.0f} s and worked on these stages for "
        f"{accounting['device_worked_s']:.0f} s: {many} measured a device-hour."
    )


def _kept(kept: Mapping[str, Any]) -> str:
    if not kept["measured"]:
        return "Nothing was measured, so nothing was kept."
    text = f"Tier 1 kept {kept['kept']} of {kept['measured']} ({kept['keep_rate']:.0%})"
    if kept["confirmed_keep_rate"] is not None:
        judged = kept["confirmed"] + kept["refuted"]
        text += f"; all layers confirmed {kept['confirmed']} of {judged} ({kept['confirmed_keep_rate']:.0%})"
    return text + (f"; not measured there: {kept['unconfirmed']}." if kept["unconfirmed"] else ".")


def _winner(row: Mapping[str, Any]) -> str:
    parts = [f"its first pair showed {row['one_look']:.2f}x", f"tier 1 {_interval(row['tier1'])}"]
    parts += [f"tier 2 {_interval(row['tier2'])}"] if row["tier2"] else []
    parts += [f"held-out traffic {_interval(row['end_to_end'])}"] if row["end_to_end"] else []
    return f"{row['name']}: {', '.join(parts)}."


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['ratio']:.2f}x ({found['ci_low']:.2f} to {found['ci_high']:.2f})"


def _prediction(row: Mapping[str, Any]) -> str:
    behind = BADGES.get(row["provenance"], row["provenance"] or "unknown")
    return (
        f"Predictions of tier {row['tier']} ({behind}) were off by {row['median_error']:.0%} at the median "
        f"({_many(row['count'], 'measurement')})."
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
