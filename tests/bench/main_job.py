"""The main job on the demo model in a terminal, and the baseline and the winner beside transformers, eager and compiled.

transformers runs in processes of its own, in turns with ours: the same prompts' lengths, greedy, decode timed apart.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.models.resolve import resolve_model
from optimizer.measure.rig import Rig
from optimizer.measure.tiers import Content
from tests.bench.figures import Figure
from tests.paths import ROOT

BUDGET = "5m"
PROMPT, NEW, REPEATS = 512, 64, 3
BATCHES = (1, 8)
THREADS = 2


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        report = optimise(data)
        return of_report(report) + beside_transformers(data, report)


def optimise(data: Path) -> dict[str, Any]:
    out = data / "report.json"
    command = [sys.executable, "-m", "optimizer", "--model", "demo", "--traffic", "demo", "--budget", BUDGET]
    subprocess.run([*command, "--data", str(data), "--out", str(out)], cwd=ROOT, check=True)
    return dict(json.loads(out.read_text()))


def of_report(report: dict[str, Any]) -> list[Figure]:
    counts, speed = report["counts"], report["speedup"] or {}
    by_name = {s["name"]: s for s in report["scenarios"]}
    checks = [c["verdict"] for c in report["verification"] if c["verdict"] != "not_applicable"]
    figures = [
        Figure("behaviour-distinct sources measured", counts["distinct_sources"], "sources", 10),
        Figure("foci they came from", counts["foci"], "foci", 3),
        Figure("mechanisms", counts["mechanisms"], "mechanisms", 2),
        Figure("measured at tier 1", counts["tier1"], "candidates"),
        Figure("measured an hour", counts["per_hour"]["tier1"], "candidates/h"),
        Figure("verification checks passed", checks.count("pass"), "checks", len(checks), "equal"),
        Figure("held-out output tok/s over the baseline", speed.get("ratio"), "x", 1.3),
        Figure("lower bound of its 95% interval", speed.get("ci_low"), "x", 1.15),
        Figure("pairs", speed.get("pairs"), "pairs"),
    ]
    for name in ("stable", "burst"):
        s = by_name.get(name, {})
        figures.append(Figure(f"{name} traffic", s.get("ratio"), "x"))
        figures.append(Figure(f"{name} traffic, lower bound", s.get("ci_low"), "x"))
    swap = report["swap"]
    figures.append(Figure("hot swap to the winner's kind", swap["hot_swap_s"], "s"))
    figures.append(Figure("cold start of the server", swap["cold_start_s"], "s"))
    return figures


def beside_transformers(data: Path, report: dict[str, Any]) -> list[Figure]:
    """Decode and prefill tok/s of all four, in turns; medians."""
    model, store = resolve_model("demo", data), ArtifactStore(data)
    ours = {"baseline": store.baseline()}
    if report["winner"]:
        ours["winner"] = store.get(report["winner"]["artifact_hash"])
    figures = []
    for batch in BATCHES:
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(REPEATS):
            for name, artifact in ours.items():
                found.setdefault(name, []).append(our_speed(model, artifact, batch))
            for mode in ("eager", "compiled"):
                found.setdefault(mode, []).append(transformers_speed(model, mode, batch))
        decode = {name: statistics.median(d for _, d in pairs) for name, pairs in found.items()}
        prefill = {name: statistics.median(p for p, _ in pairs) for name, pairs in found.items()}
        whole = {name: 1 / (PROMPT / prefill[name] + NEW / decode[name]) for name in found}  # answers a second
        for name in found:
            figures.append(Figure(f"{name}, batch {batch}: prefill", prefill[name], "tok/s"))
            figures.append(Figure(f"{name}, batch {batch}: decode", decode[name], "tok/s"))
        against = {"prefill": prefill, "decode": decode, "prompt and answer": whole}
        for what, rates in against.items():
            goal = 1.0 if rates is whole else None
            ratio = rates["baseline"] / rates["eager"]
            figures.append(Figure(f"baseline over transformers eager, batch {batch}: {what}", ratio, "x", goal))
            if "winner" in rates:
                ratio = rates["winner"] / max(rates["eager"], rates["compiled"])
                figures.append(Figure(f"winner over the better transformers, batch {batch}: {what}", ratio, "x", goal))
    return figures


def our_speed(model: Path, artifact: Artifact, batch: int) -> tuple[float, float]:
    """Prefill and decode tok/s through a fresh engine host, after one untimed pass."""
    with HostClient(model, threads=THREADS) as host:
        rig = Rig(host, artifact, kv_bytes=512 << 20)
        content = Content(49152, batch)
        seconds = [0.0, 0.0]
        for _ in range(2):
            script = content.script(batch, PROMPT, NEW, chunk=512)
            tables = rig.tables(script)
            for i, steps in enumerate((script.prefill_steps(tables), script.decode_steps(tables))):
                start = time.perf_counter()
                for step in steps:
                    rig.step(step)
                seconds[i] = time.perf_counter() - start
    return batch * PROMPT / seconds[0], batch * NEW / seconds[1]


def transformers_speed(model: Path, mode: str, batch: int) -> tuple[float, float]:
    command = [
        sys.executable,
        "-m",
        "tests.bench.transformers_speed",
        str(model),
        mode,
        str(batch),
        str(PROMPT),
        str(NEW),
        str(THREADS),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    prefill, decode = json.loads(done.stdout.splitlines()[-1])
    return float(prefill), float(decode)
