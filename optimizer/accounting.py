"""What a run did and what came of it: counts and seconds of each stage, what was kept and confirmed, what one look had claimed.

Counts and seconds are of all attempts at the run. A device is held from the claim to the report, so rates are an hour of that.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from optimizer.ledger import Ledger
from optimizer.records import FASTER, MEASURED, Experiment, State

STAGES = (  # key, what it is called, what is counted
    ("profile", "Profile", "the machine and the baseline"),
    ("predicted", "Predicted only", "candidates that were never measured"),
    ("tier1", "Tier 1", "measured on a few layers"),
    ("tier2", "Tier 2", "measured on all layers"),
    ("verified", "Verification", "finalists that passed"),
    ("end_to_end", "End to end", "measured over HTTP"),
)
MOST_GAINS = 10


def account(ledger: Ledger, winner: str = "", speedup: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The report's `accounting`; shares are None where nothing was there to take a share of.

    `winner` names the candidate as it was searched, `speedup` is what it gave over HTTP on held-out traffic.
    """
    first, again, whole = _by_candidate(ledger.experiments.values())
    held_s = ledger.elapsed()
    distinct = ledger.counts()["distinct_behaviours"]
    return {
        "stages": _stages(ledger),
        "device_s": held_s,
        "device_worked_s": sum(ledger.stage_s.values()),
        "distinct_per_device_hour": distinct / held_s * 3600 if held_s > 0 else None,
        "kept": _kept(again, whole),
        "one_look": _one_look(first, again),
        "gains": [_gain(ledger, first[h], again[h], whole.get(h)) for h in _boldest(first)],
        "winner": _gain(ledger, first[winner], again[winner], whole.get(winner)) | {"end_to_end": speedup}
        if winner in first
        else None,
        "predictions": predictions(ledger),
        "language_models_usd": _language_models(ledger),
    }


def _by_candidate(
    experiments: Iterable[Experiment],
) -> tuple[dict[str, Experiment], dict[str, Experiment], dict[str, Experiment]]:
    """Artefact hash -> its first visit at tier 1, its last one, its result at tier 2 (a failure too)."""
    first: dict[str, Experiment] = {}
    last: dict[str, Experiment] = {}
    whole: dict[str, Experiment] = {}
    for e in experiments:
        if e.tier == 1 and e.state in MEASURED:
            if e.visit == 1:
                first[e.artifact_hash] = e
            if e.artifact_hash not in last or e.visit > last[e.artifact_hash].visit:
                last[e.artifact_hash] = e
        elif e.tier == 2:
            whole[e.artifact_hash] = e
    return {h: first.get(h, e) for h, e in last.items()}, last, whole


def _stages(ledger: Ledger) -> list[dict[str, Any]]:
    counts = ledger.counts()
    return [
        {"stage": key, "title": title, "what": what, "count": counts.get(key), "seconds": ledger.stage_s.get(key, 0.0)}
        for key, title, what in STAGES
    ]


def _kept(last: Mapping[str, Experiment], whole: Mapping[str, Experiment]) -> dict[str, Any]:
    """`confirmed`: what tier 1 found faster than its rival was surely faster than it again, on all layers and the traffic.

    What was kept and not measured there (the time was up) is `unconfirmed`, and no part of the confirmed rate.
    """
    kept = [h for h, e in last.items() if e.state in FASTER]
    again = [h for h in kept if h in whole]
    confirmed = sum(whole[h].leads for h in again)
    return {
        "measured": len(last),
        "kept": len(kept),
        "confirmed": confirmed,
        "refuted": len(again) - confirmed,
        "unconfirmed": len(kept) - len(again),
        "keep_rate": _share(len(kept), len(last)),
        "confirmed_keep_rate": _share(confirmed, len(again)),
    }


def _one_look(first: Mapping[str, Experiment], last: Mapping[str, Experiment]) -> dict[str, Any]:
    """What would have been kept had each program been timed once beside its rival, and how much of that held."""
    claimed = [h for h, e in first.items() if e.samples and e.samples[0] > 1]
    held = [h for h in claimed if last[h].state in FASTER]
    return {"claimed": len(claimed), "held": len(held), "false_share": _share(len(claimed) - len(held), len(claimed))}


def _claim(first: Experiment) -> float:
    """Speed over the baseline that the first pair alone showed."""
    if not first.samples or not first.ratio:
        return 0.0
    return first.samples[0] * first.ratio / (first.paired or first.ratio)


def _boldest(first: Mapping[str, Experiment]) -> list[str]:
    return sorted((h for h, e in first.items() if _claim(e) > 0), key=lambda h: -_claim(first[h]))[:MOST_GAINS]


def _gain(ledger: Ledger, first: Experiment, last: Experiment, whole: Experiment | None) -> dict[str, Any]:
    """One program's speed over the baseline: by its first pair, by all of tier 1, by tier 2. None where it has none."""
    candidate = ledger.candidates.get(first.artifact_hash)
    found = whole if whole and whole.state in MEASURED else None
    names = ("ratio", "ci_low", "ci_high")
    return {
        "artifact_hash": first.artifact_hash,
        "name": candidate.name if candidate else first.artifact_hash[:12],
        "one_look": _claim(first),
        "tier1": {n: getattr(last, n) for n in names},
        "tier2": {n: getattr(found, n) for n in names} if found else None,
        "confirmed": bool(whole and whole.leads and last.state in FASTER),
        "failed": whole.failure if whole and whole.state is State.FAILED else "",
    }


def predictions(ledger: Ledger) -> list[dict[str, Any]]:
    """How far measured ratios were from what had been foreseen, by tier and by what stood behind it."""
    errors: dict[tuple[int, str], list[float]] = defaultdict(list)
    for e in ledger.experiments.values():
        if e.state in MEASURED and e.predicted and e.ratio and e.visit == 1:
            errors[e.tier, e.provenance].append(abs(e.predicted / e.ratio - 1))
    return [
        {"tier": tier, "provenance": provenance, "count": len(found), "median_error": statistics.median(found)}
        for (tier, provenance), found in sorted(errors.items())
    ]


def _language_models(ledger: Ledger) -> float | None:
    """USD of all agents; None where a model has no price, or none was asked."""
    costs = [used["usd"] for used in ledger.usage.values()]
    return sum(costs) if costs and None not in costs else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
