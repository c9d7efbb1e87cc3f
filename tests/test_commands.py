"""The commands a newcomer types: they work, or say in one sentence what is wrong and exit with something but zero."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bootstrap
from tests.paths import ROOT


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def test_it_names_the_python_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit) as stop:
        bootstrap.check_machine()
    assert stop.value.code == 1
    assert "Python 3.11 or newer is needed, and this is 3.9" in capsys.readouterr().err


def test_it_says_when_the_disk_is_too_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(bootstrap, "PYTHON", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setattr(
        bootstrap.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 3 * 10**8)
    )
    with pytest.raises(SystemExit) as stop:
        bootstrap.check_machine()
    assert stop.value.code == 1
    assert "0.3 GB are free" in capsys.readouterr().err


def test_it_says_which_candidates_are_off_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    bootstrap.check_machine()
    assert "candidates with C++ kernels or torch.compile are off" in capsys.readouterr().err


def test_an_unknown_benchmark_is_named_with_those_there_are() -> None:
    done = run("-m", "tests.bench", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr and "main_job" in done.stderr


@pytest.mark.parametrize("module", ["engine.core", "engine.api", "engine.gateway", "engine.client", "optimizer.search"])
def test_torch_stays_in_the_host(module: str) -> None:
    done = run("-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_torch_stays_out_of_web_and_worker() -> None:
    program = (
        "import sys, polymorph_web.asgi, polymorph_web.celery, polymorph_web.runs.tasks; print('torch' in sys.modules)"
    )
    done = run("-c", program, DJANGO_SETTINGS_MODULE="polymorph_web.settings")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
