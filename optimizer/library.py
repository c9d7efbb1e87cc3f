"""The main job in a few lines of Python; the command line stands on it too.

from optimizer import optimise
report = optimise(model="demo", traffic="demo", budget="5m", data="data")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.config import RunConfig, parse_duration
from optimizer.file_store import FileStore, worker_name
from optimizer.ledger import LEASE_TTL_S, OnEvent
from optimizer.search import Search, SearchFailed
from optimizer.store import Lease
from optimizer.traffic.profile import TrafficProfile
from optimizer.traffic.sources import load_traffic


def optimise(
    model: str | Path = "demo",
    traffic: str | TrafficProfile = "demo",
    budget: str = "5m",
    data: str | Path = "data",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs to the end in this process and returns what the command writes to `report.json`, also when nothing beat the baseline.

    `model`, `traffic` and `budget` are what the command takes; `settings` are further fields of `RunConfig` (tolerance,
    threads, foci, objective, ...). `on_event` hears every event as (kind, payload). What was measured stays in `data`.
    Raises ConfigError, TrafficError, TraceError for what cannot be asked for, SearchFailed for a run without a result.
    """
    store = FileStore(Path(data))
    profile = traffic if isinstance(traffic, TrafficProfile) else load_traffic(traffic)
    config = new_run(store, str(model), profile, budget, **settings)
    report = Search(config, store, on_event).run(claimed(store, config.run_id))
    if report is None:
        raise SearchFailed(f"Run {config.run_id} was stopped. What was measured is kept in {config.run_dir}.")
    return report


def new_run(store: FileStore, model: str, traffic: TrafficProfile, budget: str, **settings: Any) -> RunConfig:
    """A run that waits to be claimed. Raises ConfigError, and TypeError for a setting that does not exist."""
    named = {"name": f"{model} on {traffic.name}"} | settings
    config = RunConfig(
        model=model,
        traffic=traffic.to_json(),
        data_dir=str(store.root.parent),
        budget_s=parse_duration(budget),
        **named,
    )
    store.create(config.run_id, config.to_json())
    return config


def claimed(store: FileStore, run_id: str) -> Lease:
    """Raises SearchFailed for a run that is not to be had."""
    lease = store.claim(run_id, worker_name(), LEASE_TTL_S)
    if lease is None:
        raise SearchFailed(f"Run {run_id} has ended, or another worker holds it. Start a new one without --resume.")
    return lease
