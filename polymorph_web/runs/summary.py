"""What pages say about a run, worked out from its rows: sentences, verdicts, grids."""

from __future__ import annotations

from typing import Any

from optimizer.accounting_text import sentences
from optimizer.records import State
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import Run, RunRecord

UNTOUCHED = (
    "The running endpoint: it goes on serving its version until somebody approves another.",
    "The model's weights, tokenizer and chat template.",
    "Your requests: only their shapes are used, prompts are synthetic.",
)
WORSE_THAN = 0.97  # a scenario or figure under this share of the baseline is called a regression


def expected(minutes: float, endpoint: Endpoint) -> dict[str, str]:
    low, high = minutes * 0.9, minutes * 1.25
    cost = endpoint.price_per_hour * minutes / 60
    text = f"about {low:.0f}-{high:.0f} minutes" if minutes >= 2 else f"about {60 * low:.0f}-{60 * high:.0f} seconds"
    return {
        "duration_text": text,
        "cost_text": f"${cost:.2f} of device time" if cost else "no price is set for this device",
    }


def sentence(report: dict[str, Any]) -> str:
    """The result in one sentence: what a person decides on."""
    speedup = report.get("speedup") or {}
    if report.get("outcome") != "succeeded" or not speedup.get("ratio"):
        return "No candidate was both verified and faster than the baseline; the endpoint stays as it is."
    return (
        f"On held-out traffic the winner gave {speedup['ratio']:.2f} times the baseline's {objective_title(report)} "
        f"(95% confidence interval {speedup['ci_low']:.2f} to {speedup['ci_high']:.2f}, {speedup.get('pairs', 0)} interleaved pairs)."
    )


def objective_title(report: dict[str, Any]) -> str:
    """What the ratio is of, as it stands in a sentence; reports of earlier versions know only one."""
    return str((report.get("objective") or {}).get("title") or "output tokens/s")


def language_models(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each language-model agent of a live page's state: what it took, and what came of it."""
    agents = [p.get("agent") for p in state["proposals"]]
    kept = {
        (e["agent"], e["artifact_hash"])
        for e in state["experiments"]
        if e["tier"] >= 2 and e["state"] == State.KEEP.value
    }
    return [
        {
            **used,
            "proposals": agents.count(used["agent"]),
            "kept": sum(agent == used["agent"] for agent, _ in kept),
            "failed": [{"kind": kind.replace("_", " "), "count": n} for kind, n in sorted(used["failures"].items())],
        }
        for used in sorted(state["llm_usage"], key=lambda row: row["agent"])
    ]


def report_context(run: Run) -> dict[str, Any]:
    report = run.report or {}
    checks = report.get("verification") or []
    asked = [c for c in checks if c.get("verdict") != "not_applicable"]
    better, worse = changes(report)
    return {
        "report": report,
        "sentence": sentence(report),
        "objective_title": objective_title(report),
        "accounting_words": accounting_words(report),
        "checks": checks,
        "checks_passed": sum(c.get("verdict") == "pass" for c in asked),
        "checks_total": len(asked),
        "improvements": better,
        "regressions": worse,
    }


def accounting_words(report: dict[str, Any]) -> list[str]:
    """Empty for reports of earlier versions, which have no accounting."""
    accounting = report.get("accounting")
    return sentences(accounting, report.get("time_lost") or []) if accounting else []


def changes(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What got better and what got worse, each a sentence. Latencies are in seconds in the report, milliseconds here."""
    better, worse = [], []
    for scenario in report.get("scenarios") or []:
        ratio = scenario.get("ratio")
        if ratio:
            title = objective_title(report)
            text = f"{title[0].upper()}{title[1:]} under {scenario['name']} traffic: {ratio:.2f} times the baseline's."
            (worse if ratio < WORSE_THAN else better).append(text)
    baseline, winner = report.get("baseline") or {}, report.get("winner") or {}
    for name, title in (
        ("median_ttft", "Median TTFT"),
        ("p95_ttft", "p95 TTFT"),
        ("median_tpot", "Median TPOT"),
        ("p95_tpot", "p95 TPOT"),
    ):
        before, after = baseline.get(name), winner.get(name)
        if before and after:
            text = f"{title}: {1e3 * before:.1f} ms before, {1e3 * after:.1f} ms after."
            (worse if before / after < WORSE_THAN else better).append(text)
    return better, worse


def candidate(run: Run, artifact_hash: str) -> dict[str, Any] | None:
    """Everything stored about one candidate of a run, or None."""
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RunRecord.KINDS}
    for record in run.records.filter(artifact_hash=artifact_hash).order_by("id"):
        records[record.kind].append(record.payload)
    if not records["candidate"]:
        return None
    found = records["candidate"][0]
    proposal = run.records.filter(kind="proposal", key=found["proposal_id"]).first()
    estimate = records["estimate"][-1] if records["estimate"] else None
    return {
        "candidate": found,
        "proposal": proposal.payload if proposal else None,
        "estimate": estimate,
        "experiments": records["experiment"],
        "checks": records["check"],
        "verdict": verdict(records["experiment"], records["check"]),
        "lineage": lineage(run, found),
    }


def verdict(experiments: list[dict[str, Any]], checks: list[dict[str, Any]]) -> dict[str, str]:
    failed = [c for c in checks if c["verdict"] == "fail"]
    if failed:
        return {
            "state": "failed",
            "icon": "x",
            "text": f"Rejected: the check {failed[0]['check']} ({failed[0]['case']}) failed.",
        }
    last = max(experiments, key=lambda e: e["tier"], default=None)
    passed = f"{sum(c['verdict'] == 'pass' for c in checks)} verification checks passed."
    if last is None and checks:
        return {
            "state": "keep",
            "icon": "check",
            "text": f"A finalist's source, cleaned; its parent was measured. {passed}",
        }
    if last is None:
        return {"state": "predicted", "icon": "circle", "text": "Predicted only: it was never measured."}
    if last["state"] == "failed":
        return {"state": "failed", "icon": "x", "text": f"Failed: {last['failure']}"}
    interval = f"95% interval {last['ci_low']:.2f} to {last['ci_high']:.2f}"
    text = f"{last['ratio']:.2f} times the baseline's speed ({interval}), tier {last['tier']}."
    if checks:
        text += f" {passed}"
    return {"state": last["state"], "icon": "check" if last["state"] == "keep" else "minus", "text": text}


def lineage(run: Run, found: dict[str, Any]) -> list[dict[str, str]]:
    """The candidate's ancestors in this run, oldest first, itself last."""
    named = {
        r["artifact_hash"]: r["payload"]
        for r in run.records.filter(kind="candidate").values("artifact_hash", "payload")
    }
    chain, seen = [found], {found["artifact_hash"]}
    while (parent := chain[0].get("parent")) in named and parent not in seen:
        chain.insert(0, named[parent])
        seen.add(parent)
    return [{"hash": c["artifact_hash"], "name": c["name"]} for c in chain]


def reproduce(run: Run) -> str:
    minutes = run.budget_s / 60
    seed = run.config.get("seed", 0)
    return f"python -m optimizer --model {run.endpoint.model_ref} --traffic traffic.json --budget {minutes:g}m --seed {seed}"
