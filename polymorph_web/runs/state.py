"""A run as its live page first shows it, put together from stored rows; later events are applied on top by the page."""

from __future__ import annotations

from typing import Any

from polymorph_web.runs.models import Run, RunEvent, RunRecord

LOG_LINES = 200


def live_state(run: Run) -> dict[str, Any]:
    """JSON-ready: see the page's script for how events change it."""
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RunRecord.KINDS}
    for record in run.records.exclude(kind="post").order_by("id").values("kind", "payload"):  # see board.py for those
        payload = record["payload"]
        payload.pop("files", None)
        payload.pop("build_log", None)
        by_kind[record["kind"]].append(payload)
    names = {c["artifact_hash"]: c for c in by_kind["candidate"]}
    experiments = [{**e, **_described(names.get(e["artifact_hash"]))} for e in by_kind["experiment"]]
    return {
        "run": run_state(run),
        "last_seq": run.last_seq,
        "last_phase": _last(run, "phase").get("phase", ""),  # where it was; the row's own phase is "done" at the end
        "progress": _last(run, "progress"),
        "incumbent": _last(run, "incumbent"),
        "proposals": by_kind["proposal"],
        "candidates": candidate_rows(by_kind["candidate"], by_kind["estimate"], experiments),
        "experiments": experiments,
        "checks": by_kind["check"],
        "foci": _last(run, "foci").get("rows", []),
        "elites": _last(run, "elites").get("rows", []),
        "llm_usage": list(_usage(run).values()),
        "logs": _logs(run),
    }


def run_state(run: Run) -> dict[str, Any]:
    return {
        "id": str(run.id),
        "state": run.state,
        "phase": run.phase,
        "reason": run.reason,
        "attempt": run.attempt,
        "budget_s": run.budget_s,
        "elapsed_s": run.elapsed_s,
        "started_at": run.started.timestamp() if run.started else None,
        "finished_at": run.finished.timestamp() if run.finished else None,
        "cancel_requested": run.cancel_requested,
    }


def candidate_rows(
    candidates: list[dict[str, Any]], estimates: list[dict[str, Any]], experiments: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row a candidate, with its newest experiment of the highest tier."""
    foreseen = {e["artifact_hash"]: _foreseen(e) for e in estimates}
    newest: dict[str, dict[str, Any]] = {}
    for experiment in experiments:
        held = newest.get(experiment["artifact_hash"])
        if held is None or experiment["tier"] >= held["tier"]:
            newest[experiment["artifact_hash"]] = experiment
    shown = ("tier", "state", "ratio", "ci_low", "ci_high", "failure")
    return [
        {
            "artifact_hash": c["artifact_hash"],
            **_described(c),
            "hypothesis": c["hypothesis"],
            **foreseen.get(c["artifact_hash"], {"predicted": None}),
            **{k: newest.get(c["artifact_hash"], {}).get(k) for k in shown},
        }
        for c in candidates
    ]


def _foreseen(estimate: dict[str, Any]) -> dict[str, Any]:
    seen = (estimate.get("detail") or {}).get("seen", 0)
    return {"predicted": estimate["ratio"], "provenance": estimate["provenance"], "seen": seen}


def queue_position(run: Run) -> int:
    """How many runs are ahead of a queued one, running ones included."""
    return Run.objects.filter(state__in=("queued", "running"), created__lt=run.created).count()


def _described(candidate: dict[str, Any] | None) -> dict[str, Any]:
    return {k: (candidate or {}).get(k, "") for k in ("name", "focus", "agent", "mechanism")}


def _last(run: Run, kind: str) -> dict[str, Any]:
    event = RunEvent.objects.filter(run=run, kind=kind).order_by("-seq").first()
    return event.payload if event else {}


def _usage(run: Run) -> dict[str, dict[str, Any]]:
    """Agent -> what its language model took, all attempts together."""
    rows = RunEvent.objects.filter(run=run, kind="llm_usage").order_by("seq").values_list("payload", flat=True)
    return {payload["agent"]: payload for payload in rows}


def _logs(run: Run) -> list[dict[str, Any]]:
    rows = RunEvent.objects.filter(run=run, kind__in=("log", "phase")).order_by("-seq")[:LOG_LINES]
    return [
        {
            "seq": e.seq,
            "at": e.at,
            "level": e.payload.get("level", "info"),
            "text": e.payload.get("text") or e.payload.get("message", ""),
        }
        for e in reversed(rows)
    ]
