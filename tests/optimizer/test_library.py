"""The main job from Python: a whole run in one call, and what cannot be asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer import optimise
from optimizer.config import ConfigError
from optimizer.file_store import FileStore
from optimizer.search import SearchFailed
from tests.optimizer.scripted import SMALL, data_folder
from tests.paths import ROOT


def test_one_call_runs_the_whole_job(tiny_model: Path, tmp_path: Path) -> None:
    heard: list[str] = []

    def on_event(kind: str, payload: dict[str, Any]) -> None:
        heard.append(kind)

    data = data_folder(tmp_path / "data")
    report = optimise(
        tiny_model, SMALL, "30s", data, on_event, dtype="float32", threads=1, foci=("scheduling",), seed=3
    )  # fmt: skip
    assert report["outcome"] in ("succeeded", "no_gain") and heard[-1] == "finished"
    assert report == FileStore(data).load(report["run_id"]).report
    stages = {row["stage"]: row for row in report["accounting"]["stages"]}
    assert stages["tier1"]["count"] == report["counts"]["tier1"] > 0
    assert stages["tier1"]["seconds"] > 0 and stages["profile"]["seconds"] > 0
    assert 0 < report["accounting"]["device_worked_s"] <= report["accounting"]["device_s"]


def test_what_cannot_be_asked_for_is_said_before_the_work(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write 90s, 5m"):
        optimise(tiny_model, SMALL, "soon", tmp_path)
    with pytest.raises(ConfigError, match="choose one of exact"):
        optimise(tiny_model, SMALL, "1m", tmp_path, tolerance="loose")
    with pytest.raises(TypeError, match="hurry"):
        optimise(tiny_model, SMALL, "1m", tmp_path, hurry=True)
    assert not list(tmp_path.glob("runs/*"))


def test_a_run_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SearchFailed, match="nowhere"):
        optimise(tmp_path / "nowhere", SMALL, "30s", data_folder(tmp_path / "data"))


def test_importing_the_package_loads_no_search() -> None:
    code = "import optimizer, sys; sys.exit('optimizer.search' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
