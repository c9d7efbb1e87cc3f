"""The device check: what it says without a GPU, that its parts run (small, interpreted), that a wrong kernel fails it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import device_check
from kernels.gpu import check_values
from kernels.gpu.check_values import Shapes, Values
from kernels.paged_decode_attention import triton as paged_decode_attention
from tests import paths

SMALL = Shapes(128, 128, 1, 2, 1, 64, 150, 40, (1, 65), 3)
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_exits_0(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, "-m", "kernels.device_check", "--out", str(out)],
        capture_output=True, text=True, cwd=paths.ROOT, check=True,
    )  # fmt: skip
    assert done.stdout == "no device\n"
    assert json.loads(out.read_text())["device"] is None


def test_all_parts_run_and_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode_attention, "PROGRAMS_WANTED", 4)  # the interpreter runs programs one after another
    report = device_check.Report(tmp_path / "check.json", 1000.0)
    device_check.check(report, CPU, SMALL)
    assert report.problems == []
    written = json.loads((tmp_path / "check.json").read_text())
    assert {"device", "values", "bandwidth", "decode", "swap", "fp8"} <= written.keys()
    assert written["swap"]["result"]["dispatch"]["paged_decode_attention"] == 1


def test_a_wrong_kernel_fails_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_values, "matmul", lambda x, w: x @ w.T * 1.1)
    values = Values(SMALL, CPU)
    monkeypatch.setattr(values, "checks", lambda: {"small_m_matmul": lambda: values.product("small_m_matmul", 1)})
    assert device_check.judge_values(values.run()) != []


def test_values_that_are_not_finite_are_infinitely_wrong() -> None:
    assert check_values.error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_a_part_that_raises_or_comes_too_late_is_a_problem(tmp_path: Path) -> None:
    report = device_check.Report(tmp_path / "check.json", 1000.0)
    report.part("broken", lambda: 1 / 0, lambda _: [])
    report.limit_s = -1.0
    report.part("late", lambda: 1, lambda _: [])
    assert [p.split(":")[0] for p in report.problems] == ["broken", "late"]
    assert "ZeroDivisionError" in json.loads((tmp_path / "check.json").read_text())["broken"]["trace"]
