"""A verified winner as a folder that anyone can read, serve and doubt.

README.md serve.sh <artifact_hash>/{manifest.json, sources, build/*.so} evidence/{report, checks, experiments}.json samples.csv
"""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.artifacts import Artifact, ArtifactStore
from optimizer.records import to_json
from optimizer.report import SIDES
from optimizer.store import RunState


class ExportError(Exception):
    """There is nothing to export, or no room for it; the text names the mend."""


def export(state: RunState, artifacts: ArtifactStore, out: Path) -> Path:
    """Writes the run's winner to `out`, which must not exist yet: whole, or not at all. Raises ExportError, ArtifactError."""
    report = state.report
    if not report or not report.get("winner"):
        raise ExportError(f"Run {state.run_id} has no verified winner: there is nothing to export.")
    if out.exists():
        raise ExportError(f"{out} exists already: name a folder that does not.")
    artifact = artifacts.get(report["winner"]["artifact_hash"])
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(artifact.path, staging / artifact.hash)
        write_evidence(staging / "evidence", state, report)
        (staging / "README.md").write_text(readme(state, report, artifact))
        script = staging / "serve.sh"
        script.write_text(serve_script(state.config, artifact.hash))
        script.chmod(0o755)
        staging.chmod(0o755)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def write_evidence(folder: Path, state: RunState, report: Mapping[str, Any]) -> None:
    """What the claim rests on: the report, every check, every experiment of the winner and of what it was cleaned from."""
    folder.mkdir()
    winner = report["winner"]["artifact_hash"]
    parents = {c.parent for c in state.candidates if c.artifact_hash == winner}
    kept = {"report": report | {"winner": {k: v for k, v in report["winner"].items() if k != "files"}}}
    kept["checks"] = [to_json(c) for c in state.checks if c.artifact_hash == winner]
    kept["experiments"] = [to_json(e) for e in state.experiments if e.artifact_hash in {winner, *parents}]
    kept["config"] = {k: v for k, v in state.config.items() if k != "data_dir"}
    for name, data in kept.items():
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1))
    write_samples(folder / "samples.csv", report["samples"])


def write_samples(path: Path, samples: Mapping[str, Any]) -> None:
    """Every request of the final measurement, one a row; times in seconds."""
    columns = sorted({name for side in SIDES for row in samples[side] for name in row})
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["side", *columns])
        writer.writerows([side, *(row.get(c) for c in columns)] for side in SIDES for row in samples[side])


def serve_script(config: Mapping[str, Any], artifact_hash: str) -> str:
    """Starts one OpenAI-compatible server of this version. MODEL and PORT may be set outside."""
    settings = f"--dtype {config['dtype']} --threads {config['threads']} --kv-bytes {config['max_kv_bytes']}"
    return f"""#!/bin/sh
# Serves this version on port ${{PORT:-8000}}. Run it where the polymorph repository's `engine` package can be imported.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "${{PYTHON:-python3}}" -m engine.api --artifact "$here/{artifact_hash}" --model "${{MODEL:-{shlex.quote(config["model"])}}}" \\
  --name "${{NAME:-model}}" --port "${{PORT:-8000}}" {settings} --version-id {artifact_hash[:12]}
"""


def readme(state: RunState, report: Mapping[str, Any], artifact: Artifact) -> str:
    """The claim, what it was measured on, how to serve it, what the folder holds and what is not claimed."""
    winner, speed, manifest = report["winner"], report["speedup"], artifact.manifest
    checks = [c for c in report["verification"] if c["verdict"] != "not_applicable"]
    passed = sum(c["verdict"] == "pass" for c in checks)
    sources = "\n".join(f"- `{name}`, sha256 `{digest}`" for name, digest in sorted(manifest.files.items()))
    limits = "\n".join(f"- {line}" for line in report["limits"])
    environment = ", ".join(f"{k} {v}" for k, v in report["environment"].items() if isinstance(v, str | int))
    return f"""# {winner["name"]}

{report["reason"]}

{speed["ratio"]:.2f} times the baseline's {speed["metric"]}, 95% interval {speed["ci_low"]:.2f} to {speed["ci_high"]:.2f}, from \
{speed["pairs"]} interleaved pairs over HTTP on held-out traffic. {passed} of {len(checks)} verification checks passed, in processes
that never saw the benchmark. Checks are a gate, not a guarantee.

Why it should be faster: {winner["hypothesis"]}

## Serve it

    MODEL=<folder in Hugging Face layout> PORT=8000 ./serve.sh

A library in `build/` was compiled for the machine below; on another one, store the sources again and they are compiled there.

## What is here

Version `{artifact.hash}`, settings {json.dumps(dict(manifest.settings), sort_keys=True)}, precision {manifest.precision}.

{sources}
- `evidence/`: the report, every check with its seed and limit, every paired sample of the search, each request of the final
  measurement, and the run's configuration.

Measured on: {environment}.

## What is not claimed

{limits}
"""
