"""The end of a run: finalists are verified in fresh processes, the first that passes is measured over HTTP, all is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.artifacts import Artifact
from optimizer.agents.base import Tried
from optimizer.config import Budget, RunConfig
from optimizer.lab import Lab, Scene
from optimizer.ledger import Ledger, passed
from optimizer.measure.end_to_end import EndToEnd, Job, measure_end_to_end
from optimizer.measure.samples import Slo
from optimizer.measure.servers import MeasureFailed, ServerSpec
from optimizer.records import Check
from optimizer.report import Facts, Winner, build_report
from optimizer.verify import controls
from optimizer.verify.runner import Verifier

MAX_FINALISTS = 3
LEAST_MEASURE_S = 10.0


class NoFinalist(Exception):
    """Nothing beat the baseline and was verified; the text says why, calmly."""


@dataclass(frozen=True, slots=True)
class Won:
    tried: Tried
    artifact: Artifact
    checks: list[Check]


@dataclass
class Finals:
    config: RunConfig
    budget: Budget
    scene: Scene
    lab: Lab
    ledger: Ledger

    def conclude(self, finalists: Sequence[Tried]) -> dict[str, Any]:
        """The report: of the first finalist that is verified and measured, or of none. Raises MeasureFailed."""
        try:
            won, measured = self._first(finalists)
        except NoFinalist as nothing:
            return self._report(None, str(nothing))
        winner = Winner(won.tried.candidate, won.artifact, won.checks, measured)
        speed = measured.heldout.ratio
        times = f"{speed.ratio:.2f} times the baseline's {self.config.goal.title}"
        interval = f"95% interval {speed.ci_low:.2f} to {speed.ci_high:.2f}"
        if speed.ci_low <= 1.0:
            reason = f"On held-out traffic {winner.candidate.name} gave {times} ({interval}): no sure gain. The baseline stays."
            return self._report(None, reason)
        return self._report(winner, f"On held-out traffic {winner.candidate.name} gave {times} ({interval}).")

    def _report(self, winner: Winner | None, reason: str) -> dict[str, Any]:
        self.ledger.enter("report", "Writing the report.")
        lab = self.lab
        facts = Facts(self.scene.environment(), lab.operators, lab.steps, lab.baseline.hash)
        return build_report(self.config, self.ledger, facts, winner, reason)

    def _first(self, finalists: Sequence[Tried]) -> tuple[Won, EndToEnd]:
        """The first finalist that is verified and measured. Raises NoFinalist."""
        if not finalists and not self.ledger.counts()["tier1"]:
            raise NoFinalist(
                "The time was up before any candidate was measured: give the run more of it. The baseline stays."
            )
        if not finalists:
            raise NoFinalist(
                "No candidate beat the baseline by more than the noise of this machine. The baseline stays."
            )
        refused: list[str] = []
        for tried in finalists[:MAX_FINALISTS]:
            won = self.verify(tried)
            if won is None:
                refused.append(tried.candidate.name)
                continue
            try:
                return won, self._within_memory(self.measure(won))
            except MeasureFailed as failure:
                if failure.side == "baseline":
                    raise
                self.ledger.log(f"{tried.candidate.name} could not be served: {failure}", "warning")
                refused.append(tried.candidate.name)
        raise NoFinalist(f"No finalist passed verification ({', '.join(refused)}). The baseline stays.")

    def verify(self, tried: Tried) -> Won | None:
        candidate = tried.candidate
        self.ledger.enter("verify", f"Verifying {candidate.name} in a fresh process.")
        artifact = self.lab.artifacts.get(candidate.artifact_hash)
        verifier = self._verifier()
        verifier.control_caught = controls.known(verifier, Path(self.config.data_dir))
        with self.ledger.stage("verified"):
            checks = verifier.verify(artifact)
        verified = passed(checks)
        self.ledger.verdict(candidate.artifact_hash, verified)
        if not verified:
            why = next(
                (f"{c.check}, {c.case}: {c.detail or c.verdict}" for c in checks if c.verdict != "pass"), "no check ran"
            )
            self.ledger.log(f"{candidate.name} was not verified: {why}", "warning")
            return None
        return Won(tried, artifact, self._with_controls(verifier, checks))

    def _with_controls(self, verifier: Verifier, checks: list[Check]) -> list[Check]:
        """The planted faults of this machine and model: run once, in the time set aside for verification."""
        end = self.budget.search_end_s + self.budget.verify_s
        verifier.on_checks = lambda checks: None
        stop_at = time.monotonic() + max(0.0, end - self.ledger.elapsed())
        with self.ledger.stage("verified"):
            caught = controls.caught(verifier, Path(self.config.data_dir), stop_at)
        marked = controls.mark(checks, caught)
        if marked != checks:
            self.ledger.checks(marked)
        return marked

    def measure(self, won: Won) -> EndToEnd:
        name = won.tried.candidate.name
        self.ledger.enter("measure", f"Measuring {name} and the baseline over HTTP on held-out traffic, in turns.")
        job = Job(
            baseline=self.lab.baseline.path,
            winner=won.artifact.path,
            profile=self.scene.profile,
            server=ServerSpec(self.scene.model, self.config.dtype, self.scene.threads, self.config.max_kv_bytes),
            log_dir=self.config.run_dir,
            budget_s=max(LEAST_MEASURE_S, self.config.budget_s - self.ledger.elapsed()),
            seed=self.config.seed,
            slo=Slo(**self.config.slo),
            objective=self.config.goal,
        )

        def on_pair(scenario: str, pair: int, of: int, ratio: float) -> None:
            self.ledger.check()
            self.ledger.event("end_to_end", {"scenario": scenario, "pair": pair, "of": of, "ratio": ratio})

        with self.ledger.stage("end_to_end"):
            return measure_end_to_end(job, on_pair)

    def _within_memory(self, measured: EndToEnd) -> EndToEnd:
        """Raises MeasureFailed for a winner that keeps more resident than the run allows."""
        limit, used = self.config.max_memory_bytes, measured.memory_bytes.get("winner")
        if limit and used is None:
            raise MeasureFailed("winner", "it is not known how much memory it keeps resident, and the run has a limit.")
        if limit and used > limit:
            raise MeasureFailed(
                "winner", f"it keeps {used / 1e9:.2f} GB resident and the run allows {limit / 1e9:.2f} GB."
            )
        return measured

    def _verifier(self) -> Verifier:
        return Verifier(
            model=self.scene.model,
            config=self.scene.config,
            dtype=self.config.dtype,
            threads=self.scene.threads,
            baseline=self.lab.baseline,
            artifacts=self.lab.artifacts,
            text=self.scene.text,
            log_dir=self.config.run_dir,
            tolerance=self.config.tolerance,
            floor_s=self.lab.floor_s,
            concurrency=self.lab.work.concurrency,
            on_checks=self.ledger.checks,
            between=self.ledger.check,
        )
