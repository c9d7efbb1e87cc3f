"""`report.json`: everything a person decides on, and what a sceptic needs to doubt it. Times in seconds.

Throughput and latency carry InferenceX's field names. A run without a winner has the same shape: `speedup`, `winner`
and the measured parts are empty, and `reason` says why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.artifacts import Artifact
from optimizer.accounting import account
from optimizer.accounting_text import sentences, stages_table
from optimizer.builder import kinds_off
from optimizer.config import RunConfig
from optimizer.export.finish import FINISHER
from optimizer.ledger import Ledger
from optimizer.measure.end_to_end import EndToEnd, Scenario
from optimizer.measure.samples import Slo
from optimizer.objectives import frontier, recommended, usd_per_million
from optimizer.records import Candidate, Check, clean, to_json
from optimizer.traffic.profile import TrafficProfile

SCHEMA = 1
COST_FORMULA = "price per hour / 3600 / output tokens per second x 1,000,000"
SIDES = ("baseline", "winner")
SWAP_OF = {
    "cpp": "cpp_cached",
    "settings": "settings",
    "triton": "triton",
}  # mechanism -> the kind its hot swap is timed as


@dataclass(frozen=True, slots=True)
class Winner:
    """The candidate that was verified and measured end to end."""

    candidate: Candidate
    artifact: Artifact
    checks: Sequence[Check]
    measured: EndToEnd


@dataclass(frozen=True, slots=True)
class Facts:
    """What the run found out about the machine and the baseline. `operators`: phase -> operator -> seconds a step."""

    environment: Mapping[str, Any]
    operators: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # artefact hash -> phase -> seconds
    baseline_hash: str = ""


def build_report(config: RunConfig, ledger: Ledger, facts: Facts, winner: Winner | None, reason: str) -> dict[str, Any]:
    """The report of a run that ended with a result; `reason` is one sentence."""
    report = {
        "schema": SCHEMA,
        "run_id": config.run_id,
        "name": config.name,
        "created": time.time(),
        "outcome": "succeeded" if winner else "no_gain",
        "reason": reason,
        "objective": _objective(config),
        "speedup": None,
        "baseline": {"artifact_hash": facts.baseline_hash},
        "winner": None,
        "scenarios": [],
        "by_concurrency": [],
        "frontier": [],
        "recommended": None,
        "memory": {"limit_bytes": config.max_memory_bytes or None},
        "samples": {"baseline": [], "winner": [], "pair_ratios": []},
        "operators": _operators(facts, winner),
        "verification": [to_json(c) for c in winner.checks] if winner else [],
        "counts": ledger.counts() | {"per_hour": ledger.per_hour()},
        "agents": ledger.by_agent(),
        "foci": ledger.standing.get("foci", []),
        "elites": ledger.standing.get("elites", []),
        "swap": _swap(ledger, winner),
        "cost": {"price_per_hour": config.price_per_hour, "formula": COST_FORMULA},
        "traffic": {k: v for k, v in config.traffic.items() if k != "rows"} | {"sampling": _sampling(config)},
        "environment": dict(facts.environment),
        "time_lost": ledger.time_lost(),
        "limits": _limits(config, winner, ledger),
    }
    report |= _measured(config, winner, facts) if winner else {}
    report["accounting"] = account(ledger, _searched_as(winner.candidate) if winner else "", report["speedup"])
    return clean(report)


def _measured(config: RunConfig, winner: Winner, facts: Facts) -> dict[str, Any]:
    found, candidate = winner.measured, winner.candidate
    heldout, slo = found.heldout, Slo(**config.slo)
    sides = {side: heldout.joined(side).summary(slo) for side in SIDES}
    named = {name: getattr(candidate, name) for name in ("artifact_hash", "source_hash", "name", "hypothesis", "focus")}
    named |= {"mechanism": candidate.mechanism, "agent": candidate.agent, "files": winner.artifact.files()}
    tputs = {side: sides[side]["output_tput"] for side in SIDES}
    sweep = [{"conc": s.concurrency} | {side: s.point(side) for side in SIDES} for s in found.sweep]
    points = frontier(sweep, slo, config.price_per_hour)
    return {
        "speedup": _ratio(heldout) | {"pairs": heldout.ratio.pairs, "metric": config.goal.key},
        "baseline": sides["baseline"] | {"artifact_hash": facts.baseline_hash},
        "winner": sides["winner"] | named,
        "scenarios": [_scenario(s, slo) for s in found.scenarios],
        "by_concurrency": sweep,
        "frontier": points,
        "recommended": recommended(points, config.goal),
        "memory": {"limit_bytes": config.max_memory_bytes or None}
        | {f"{k}_bytes": v for k, v in found.memory_bytes.items()},
        "samples": {side: [r.brief() for r in heldout.joined(side).requests] for side in SIDES}
        | {"pair_ratios": list(heldout.ratio.ratios)},
        "cost": {"price_per_hour": config.price_per_hour, "formula": COST_FORMULA}
        | {f"{side}_usd_per_m": usd_per_million(config.price_per_hour, tputs[side]) for side in SIDES},
    }


def _objective(config: RunConfig) -> dict[str, Any]:
    goal = config.goal
    named = {k: getattr(goal, k) for k in ("name", "title", "unit", "key", "more_is_better")}
    return named | ({"first_tokens": config.first_tokens} if goal.cuts else {})


def _ratio(scenario: Scenario) -> dict[str, float]:
    return {name: getattr(scenario.ratio, name) for name in ("ratio", "ci_low", "ci_high")}


def _scenario(scenario: Scenario, slo: Slo) -> dict[str, Any]:
    sides = {side: scenario.joined(side).summary(slo) for side in SIDES}
    return {"name": scenario.name, "what": scenario.what, "pairs": scenario.ratio.pairs} | _ratio(scenario) | sides


def _operators(facts: Facts, winner: Winner | None) -> list[dict[str, Any]]:
    """The baseline's operators. A winner is timed as a whole: its kernels do not stop where an operator ends."""
    rows: list[dict[str, Any]] = []
    own = facts.steps.get(winner.candidate.artifact_hash, {}) if winner else {}
    for phase, parts in facts.operators.items():
        if phase in own:
            rows.append({"name": f"whole {phase} step", "baseline_s": sum(parts.values()), "winner_s": own[phase]})
        rows += [{"name": f"{op} ({phase})", "baseline_s": s, "winner_s": None} for op, s in parts.items()]
    return rows


def _swap(ledger: Ledger, winner: Winner | None) -> dict[str, Any]:
    kind = SWAP_OF.get(winner.candidate.mechanism, "python") if winner else "python"
    hot = ledger.swaps.get(kind, ledger.swaps.get("python"))
    cold = winner.measured.cold_start_s["baseline"] if winner else None
    return {"cold_start_s": cold, "hot_swap_s": hot, "by_kind": dict(ledger.swaps)}


def _sampling(config: RunConfig) -> str:
    return TrafficProfile.from_json(config.traffic).sampling_text


def _limits(config: RunConfig, winner: Winner | None, ledger: Ledger) -> list[str]:
    """What this claim does not say."""
    lines = [
        "Measured on this machine and on this traffic; both sides were served by the same engine and gateway code."
    ]
    lines += [f"{note[0].upper()}{note[1:]}." for note in (_sampling(config), *(config.traffic.get("notes") or ()))]
    if config.tolerance != "exact":
        lines.append(
            f"Tolerance '{config.tolerance}': outputs may differ in rounding; verification bounds by how much."
        )
    lines += kinds_off()
    if winner:
        author = _author(winner.candidate, ledger)
        if author in ledger.usage:
            model = ledger.usage[author]["model"]
            lines.append(f"The winner's source was written by the language model {model}: review it as foreign code.")
        lines += [f"{note[0].upper()}{note[1:]}." for note in winner.measured.notes]
        blind = sorted({c.check for c in winner.checks if c.control_caught is None and c.verdict == "pass"})
        if blind:
            lines.append(f"Not shown in this run to catch its planted fault: {', '.join(blind)}.")
    return lines


def _author(candidate: Candidate, ledger: Ledger) -> str:
    """The agent that wrote the program: a finalist's cleaned source is its parent's."""
    written = ledger.candidates.get(_searched_as(candidate))
    return written.agent if written else candidate.agent


def _searched_as(candidate: Candidate) -> str:
    """The artefact that tiers 1 and 2 measured: a finalist's source is cleaned before it is verified."""
    return candidate.parent if candidate.agent == FINISHER else candidate.artifact_hash


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """The result as a table for people."""
    console.print(report["reason"], style="bold", markup=False)
    if report["recommended"]:
        console.print(f"Recommended: {report['recommended']['why']}", markup=False)
    if report["speedup"]:
        console.print(_figures(report))
        console.print(_scenarios(report))
    counts, rates = report["counts"], report["counts"]["per_hour"]
    console.print(
        f"{counts['tier1']} measured at tier 1, {counts['tier2']} on all layers, {counts['verified']} verified, "
        f"{counts['failed']} failed, {counts['predicted']} predicted only; {counts['distinct_sources']} distinct sources "
        f"from {counts['foci']} foci and {counts['mechanisms']} mechanisms; {rates['tier1']:.0f} measured an hour.",
        markup=False,
    )
    console.print(stages_table(report["accounting"]))
    for line in sentences(report["accounting"], report["time_lost"]):
        console.print(line, markup=False)
    for row in report["agents"]:
        if row["llm"]:
            console.print(_language_model(row), markup=False)
    checks = [c["verdict"] for c in report["verification"] if c["verdict"] != "not_applicable"]
    if checks:
        console.print(f"{checks.count('pass')} of {len(checks)} verification checks passed.")
    for line in report["limits"]:
        console.print(f"- {line}", style="dim", markup=False)


def _figures(report: Mapping[str, Any]) -> Table:
    table = Table(title="Held-out traffic over HTTP", title_justify="left")
    for column in ("", "baseline", "winner"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("output tok/s", "output_tput", 1, 1),
        ("median TTFT (ms)", "median_ttft", 1e3, 0),
        ("p95 TTFT (ms)", "p95_ttft", 1e3, 0),
    )
    rows += (("median TPOT (ms)", "median_tpot", 1e3, 1), ("p95 TPOT (ms)", "p95_tpot", 1e3, 1))
    for title, name, scale, digits in rows:
        values = [report[side].get(name) for side in SIDES]
        table.add_row(title, *("-" if v is None else f"{v * scale:,.{digits}f}" for v in values))
    return table


def _language_model(row: Mapping[str, Any]) -> str:
    """What a language-model agent took, and what came of it, in a sentence."""
    used = row["llm"]
    cost = "no price is set" if used["usd"] is None else f"${used['usd']:.4f}"
    failed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(used["failures"].items()))
    return (
        f"{row['agent']} ({used['model']}): {used['calls']} calls, {used['input_tokens']:,} tokens in "
        f"({used['cached_tokens']:,} cached), {used['output_tokens']:,} out, {cost}; {row['proposals']} proposals, "
        f"{row['kept']} kept{f'; failed: {failed}' if failed else ''}."
    )


def _scenarios(report: Mapping[str, Any]) -> Table:
    table = Table(title="By kind of traffic", title_justify="left")
    for column in ("traffic", "ratio", "95% interval", "pairs"):
        table.add_column(column, justify="left" if column == "traffic" else "right")
    for s in report["scenarios"]:
        table.add_row(s["name"], f"{s['ratio']:.2f}x", f"{s['ci_low']:.2f} to {s['ci_high']:.2f}", str(s["pairs"]))
    return table
