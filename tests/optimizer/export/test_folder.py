"""An exported folder serves the winner, shows its evidence, and is there whole or not at all."""

from __future__ import annotations

import csv
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.artifacts import Artifact, ArtifactError, ArtifactStore, read_artifact
from optimizer.config import RunConfig
from optimizer.export import __main__ as command
from optimizer.export.folder import ExportError, export
from optimizer.file_store import FileStore
from optimizer.ledger import Ledger
from optimizer.records import Candidate, Check, Experiment, State, Verdict
from optimizer.report import Facts, Winner, build_report
from tests.optimizer.scripted import SMALL
from tests.optimizer.test_finals import measured
from tests.paths import ROOT


class Run:
    """A run that ended with a verified winner: the baseline's program under another name."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.data, self.artifacts, self.store = folder, ArtifactStore(folder), FileStore(folder)
        self.config = RunConfig(str(model), SMALL.to_json(), str(folder), dtype="float32", threads=1)
        self.store.create(self.config.run_id, self.config.to_json())
        self.baseline = self.artifacts.baseline()
        self.artifact = self.artifacts.put(self.baseline.files(), name="the winner", settings={"block_size": 16})

    def end(self, won: bool = True) -> None:
        lease = self.store.claim(self.config.run_id, "worker", 60)
        assert lease
        ledger = Ledger(self.config, self.store, lease)
        candidate = _candidate(self.artifact)
        ledger.candidate(candidate, ok=True)
        ledger.experiment(
            candidate, Experiment("e2", self.artifact.hash, 2, State.KEEP, "b", True, 1.4, 1.3, 1.5, [1.4, 1.4])
        )
        checks = [
            Check(
                self.artifact.hash, "poison", "contamination", "NaN", 0.0, 0.0, "values", Verdict.PASS, True, "seed 7"
            )
        ]
        ledger.checks(checks)
        winner = Winner(candidate, self.artifact, checks, measured()) if won else None
        facts = Facts({"cpu": "a CPU", "threads": 1}, baseline_hash=self.baseline.hash)
        self.store.put_report(lease, build_report(self.config, ledger, facts, winner, "It was faster."))

    def export(self, out: Path) -> Path:
        return export(self.store.load(self.config.run_id), self.artifacts, out)


def _candidate(artifact: Artifact) -> Candidate:
    return Candidate(
        artifact.hash,
        artifact.source_hash,
        "p",
        "the winner",
        "ada",
        "cache",
        "python",
        "It reads less.",
        "",
        str(artifact.path),
    )


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Run:
    return Run(tmp_path / "data", tiny_model)


def test_the_folder_holds_the_version_its_evidence_and_how_to_serve_it(run: Run, tmp_path: Path) -> None:
    run.end()
    folder = run.export(tmp_path / "out")
    assert read_artifact(folder / run.artifact.hash, run.artifact.hash).files() == run.artifact.files()
    evidence = {
        name: json.loads((folder / "evidence" / f"{name}.json").read_text())
        for name in ("report", "checks", "experiments")
    }
    assert evidence["report"]["winner"]["artifact_hash"] == run.artifact.hash
    assert evidence["checks"][0]["seed_ref"] == "seed 7" and evidence["experiments"][0]["samples"] == [1.4, 1.4]
    with (folder / "evidence" / "samples.csv").open() as rows:
        assert {row["side"] for row in csv.DictReader(rows)} == {"baseline", "winner"}
    text = (folder / "README.md").read_text()
    assert (
        "1.40 times the baseline's output_tput" in text
        and run.artifact.hash in text
        and "1 of 1 verification checks" in text
    )
    assert run.artifact.manifest.files["forward.py"] in text


def test_it_says_nothing_of_where_the_data_lay(run: Run, tmp_path: Path) -> None:
    run.end()
    folder = run.export(tmp_path / "out")
    texts = [p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != "serve.sh"]
    assert not any(str(run.data) in text for text in texts)


def test_the_exported_version_serves(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    run.end()
    folder = run.export(tmp_path / "out")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {
        "PORT": str(port),
        "MODEL": str(tiny_model),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    server = subprocess.Popen([folder / "serve.sh"], env=environment, cwd=tmp_path)
    try:
        answer = _ask(port, server)
    finally:
        server.terminate()
        server.wait(20)
    assert answer["usage"]["completion_tokens"] == 4


def _ask(port: int, server: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 60
    body = json.dumps({"model": "model", "prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    while server.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status == 200:
                return json.loads(response.read())
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.1)
    raise AssertionError("the exported version did not serve")


def test_without_a_winner_there_is_nothing_to_export(run: Run, tmp_path: Path) -> None:
    run.end(won=False)
    with pytest.raises(ExportError, match="no verified winner"):
        run.export(tmp_path / "out")


def test_a_folder_that_exists_is_left_alone(run: Run, tmp_path: Path) -> None:
    run.end()
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="exists already"):
        run.export(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_version_is_not_exported(run: Run, tmp_path: Path) -> None:
    run.end()
    (run.artifact.path / "forward.py").write_text("import os\n")
    with pytest.raises(ArtifactError):
        run.export(tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out-*"))


def test_the_command_says_what_is_wrong_in_a_sentence(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.end()
    arguments = [run.config.run_id, "--data", str(run.data), "--out", str(tmp_path / "out")]
    assert command.main(arguments) == 0 and "serve.sh" in capsys.readouterr().out
    assert command.main(arguments) == 1 and "exists already" in capsys.readouterr().err
    assert command.main(["nothere", "--data", str(run.data), "--out", str(tmp_path / "x")]) == 1
    assert "nothere" in capsys.readouterr().err
