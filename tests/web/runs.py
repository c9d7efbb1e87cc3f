"""Runs as the worker leaves them: every row and event written through the store, the report built by the optimizer."""

from __future__ import annotations

import uuid
from pathlib import Path

from django.conf import settings

from engine.artifacts import Artifact, ArtifactStore
from optimizer.config import RunConfig
from optimizer.ledger import Ledger
from optimizer.measure.end_to_end import EndToEnd, Scenario
from optimizer.measure.samples import LoadResult, RequestSample
from optimizer.measure.stats import paired_ratio
from optimizer.records import Candidate, Check, Estimate, Experiment, Post, Proposal, State, Verdict
from optimizer.report import Facts, Winner, build_report
from polymorph_web.accounts.models import User
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.models import Run
from polymorph_web.runs.store import DjangoRunStore

BASELINE_S, WINNER_S = 0.010, 0.006  # a token of an answer takes so long


def queued_run(endpoint: Endpoint, user: User, budget_s: float = 300.0) -> Run:
    run_id = uuid.uuid4()
    config = RunConfig(
        model=endpoint.model_path,
        traffic=endpoint.traffic,
        data_dir=str(settings.DATA_DIR),
        run_id=str(run_id),
        name=endpoint.name,
        budget_s=budget_s,
        price_per_hour=endpoint.price_per_hour,
    )
    return Run.objects.create(id=run_id, endpoint=endpoint, created_by=user, config=config.to_json())


def searched(run: Run) -> tuple[Ledger, Winner, Artifact]:
    """A run in mid-search: a candidate kept, one failed, one predicted only, posts and checks."""
    lease = DjangoRunStore().claim(str(run.id), "worker-of-the-tests", 600)
    assert lease is not None
    ledger = Ledger(RunConfig.from_json(run.config), DjangoRunStore(), lease)
    baseline = ArtifactStore(Path(settings.DATA_DIR)).baseline()
    ledger.enter("search", "Four agents write candidates.")
    kept, artifact = _candidate(ledger, baseline, "fused gate and up", "projections")
    _candidate(ledger, baseline, "pages of <32>", "cache")
    lost, _ = _candidate(ledger, baseline, "does not compile", "attention")
    ledger.estimate(Estimate(kept.artifact_hash, 1.4, 1.2, 1.6, "fitted", {"seen": 3.0}))
    for tier in (1, 2):
        ledger.experiment(kept, measured(kept, tier, baseline.hash))
    failed = Experiment(
        "lost",
        lost.artifact_hash,
        1,
        State.FAILED,
        baseline.hash,
        False,
        failure="g++ refused <vector>.",
        log_tail="no",
    )
    ledger.experiment(lost, failed)
    ledger.incumbent(kept, 1.66, 1.6, 1.7)
    ledger.post(Post("post1", "ada", "insight", "Weights are 94% of a step <b>here</b>.", kept.artifact_hash))
    checks = [
        Check(kept.artifact_hash, "poison", "contamination", "nan", 0.0, 0.0, "bytes", Verdict.PASS, True, "seed 7"),
        Check(kept.artifact_hash, "logits", "quality", "decode", 0.01, 0.05, "KL", Verdict.PASS, None),
        Check(kept.artifact_hash, "window", "quality", "sliding", None, None, "", Verdict.NOT_APPLICABLE),
    ]
    ledger.checks(checks)
    ledger.verdict(kept.artifact_hash, True)
    ledger.log("Verified.")
    return ledger, Winner(kept, artifact, checks, _measured()), baseline


def succeeded(run: Run) -> Run:
    ledger, winner, baseline = searched(run)
    return _end(ledger, winner, baseline, "succeeded", "On held-out traffic the winner was faster.")


def without_gain(run: Run) -> Run:
    ledger, _, baseline = searched(run)
    return _end(ledger, None, baseline, "no_gain", "No candidate was verified and faster.")


def failed(run: Run, reason: str = "The search stopped with an error.") -> Run:
    store = DjangoRunStore()
    lease = store.claim(str(run.id), "worker-of-the-tests", 600)
    assert lease is not None
    store.finish(lease, "failed", reason)
    run.refresh_from_db()
    return run


def _end(ledger: Ledger, winner: Winner | None, baseline: Artifact, outcome: str, reason: str) -> Run:
    environment = {"cpu": "Test CPU", "cores": 2, "threads": 2, "torch": "2.9", "compiler": "g++ 12", "kernel": "6.1"}
    operators = {"decode": {"mlp": 0.004, "attention": 0.001}, "prefill": {"mlp": 0.02}}
    steps = {winner.candidate.artifact_hash: {"decode": 0.003}} if winner else {}
    facts = Facts(environment, operators, steps, baseline.hash)
    report = build_report(ledger.config, ledger, facts, winner, reason)
    ledger.store.put_report(ledger.lease, report)
    ledger.event("finished", {"outcome": outcome, "reason": reason})
    ledger.store.finish(ledger.lease, outcome, reason)
    return Run.objects.select_related("endpoint__organisation").get(id=ledger.config.run_id)


def _candidate(ledger: Ledger, baseline: Artifact, name: str, focus: str) -> tuple[Candidate, Artifact]:
    source = f"# {name}: größer & <faster>\ndef build(model, settings):\n    return model\n"
    artifact = ArtifactStore(Path(settings.DATA_DIR)).put({"forward.py": source}, name=name, parent=baseline.hash)
    proposal = Proposal(
        f"p-{name}", "ada", focus, name, "One read instead of two.", "python", artifact.files(), parent=baseline.hash
    )
    ledger.proposal(proposal)
    built = Candidate(
        artifact.hash, artifact.source_hash, proposal.id, name, "ada", focus, "python", proposal.hypothesis,
        baseline.hash, str(artifact.path), 0.1,
    )  # fmt: skip
    ledger.candidate(built, ok=True)
    return built, artifact


def measured(candidate: Candidate, tier: int, against: str) -> Experiment:
    return Experiment(
        f"kept-{tier}", candidate.artifact_hash, tier, State.KEEP, against, True, 1.66, 1.6, 1.7, [1.65, 1.66, 1.67],
        predicted=1.4, provenance="fitted", device_s=3.0, hot_swap_s=0.2, leads=tier == 2,
    )  # fmt: skip


def _measured() -> EndToEnd:
    heldout, stable, burst = (_scenario(name, conc) for name, conc in (("heldout", 4), ("stable", 4), ("burst", 8)))
    sweep = tuple(_scenario(f"concurrency {c}", c) for c in (1, 2, 4))
    memory = {"baseline": 1_000_000_000, "winner": 1_200_000_000}
    return EndToEnd(
        (heldout, stable, burst),
        sweep,
        {"baseline": 4.0, "winner": 4.1},
        memory,
        0.0,
        ("a note of the measurement",),
        60.0,
    )


def _scenario(name: str, conc: int, pairs: int = 3) -> Scenario:
    sides = {"baseline": BASELINE_S, "winner": WINNER_S}
    windows = {side: tuple(_window(conc, s * (1 + 0.01 * n)) for n in range(pairs)) for side, s in sides.items()}
    tputs = [[w.output_tput for w in windows[side]] for side in sides]
    return Scenario(name, f"{conc} users", conc, paired_ratio([w / b for b, w in zip(*tputs, strict=True)]), windows)


def _window(conc: int, token_s: float, osl: int = 20) -> LoadResult:
    samples = tuple(
        RequestSample(
            i, 0.0, 0.0, 5 * token_s, (token_s,) * (osl - 1), (5 + osl - 1) * token_s, 40, osl, 200,
            finish_reason="length", version="side",
        )
        for i in range(conc)
    )  # fmt: skip
    return LoadResult(samples, samples[0].e2el_s * (1 + 0.001 * conc), conc)
