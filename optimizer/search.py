"""One run from its claim to its report: profile, search, verify, measure, tell.

Everything measured is stored before it is acted on; a run that was killed goes on from what is stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.artifacts import ArtifactError, ArtifactStore
from engine.client import HostFailure
from engine.models.errors import ModelError
from optimizer.agents import make_agents
from optimizer.agents.base import Agent
from optimizer.config import Budget, ConfigError, RunConfig
from optimizer.export.finish import finished
from optimizer.finals import MAX_FINALISTS, Finals
from optimizer.lab import Lab, Scene
from optimizer.ledger import Cancelled, Ledger, OnEvent
from optimizer.measure.servers import MeasureFailed
from optimizer.session import Session
from optimizer.store import Lease, LeaseLost, RunStore
from optimizer.traffic.profile import TrafficError

EXPECTED = (ModelError, TrafficError, ConfigError, ArtifactError, HostFailure, MeasureFailed)


class SearchFailed(Exception):
    """The run ended without a result; the text is a sentence with the mend."""


class Search:
    """One run. `run` returns the report, or None when a person stopped it."""

    def __init__(
        self, config: RunConfig, store: RunStore, on_event: OnEvent | None = None, agents: list[Agent] | None = None
    ) -> None:
        self.config, self.store, self.on_event = config, store, on_event
        self.agents = make_agents(config.seed, config.foci, config.llm) if agents is None else agents
        self.budget = Budget(config.budget_s)

    def run(self, lease: Lease) -> dict[str, Any] | None:
        """Raises LeaseLost when another worker took over, SearchFailed when no result can be had."""
        with Ledger(self.config, self.store, lease, self.on_event) as ledger:
            try:
                return self._job(ledger)
            except Cancelled:
                self._end(ledger, "cancelled", f"Stopped on request. {_kept(ledger)}")
                return None
            except EXPECTED as error:
                self._end(ledger, "failed", str(error))
                raise SearchFailed(str(error)) from error
            except LeaseLost:
                raise
            except Exception as error:
                self._end(ledger, "failed", f"The search stopped with an error: {type(error).__name__}: {error}")
                raise

    def _job(self, ledger: Ledger) -> dict[str, Any]:
        ledger.enter("profile", "Measuring the machine and the baseline on this traffic.")
        scene = Scene.of(self.config)
        lab = Lab(self.config, scene, ledger, ArtifactStore(Path(self.config.data_dir)))
        try:
            with ledger.stage("profile"):
                lab.open()
            session = Session(self.config, self.agents, self.budget, ledger, lab)
            session.resume()
            ledger.enter("search", f"{len(self.agents)} agents propose; candidates are measured against the incumbent.")
            session.search()
            ledger.log(f"The engine worked on candidates for {ledger.utilisation:.0%} of the search's time.")
            lab.measure_swaps(session.builder, session.worked())
            finalists = finished(session.finalists()[:MAX_FINALISTS], session.builder, ledger)
            lab.time_steps(*[t.candidate.artifact_hash for t in finalists])
        finally:
            lab.close()
        finals = Finals(self.config, session.budget, scene, lab, ledger)
        report = finals.conclude(finalists)
        ledger.store.put_report(ledger.lease, report)
        self._end(ledger, report["outcome"], report["reason"], report.get("speedup"))
        return report

    def _end(self, ledger: Ledger, outcome: str, reason: str, speedup: dict[str, Any] | None = None) -> None:
        speedup = speedup or {}
        figures = {name: speedup.get(name) for name in ("ratio", "ci_low", "ci_high")}
        ledger.store.set_progress(ledger.lease, ledger.phase, ledger.elapsed())
        ledger.event("finished", {"outcome": outcome, "reason": reason} | figures)
        ledger.store.finish(ledger.lease, outcome, reason)


def _kept(ledger: Ledger) -> str:
    count = ledger.counts()["tier1"]
    return f"{count} measured candidates are kept." if count else "Nothing had been measured yet."
