"""Ahead-of-time compilation for GPUs that are not here: in processes of their own, where kernels are not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu import aot
from tests import paths

# 256 sums of a thread alone are more than the 255 registers it may have
SPILLING = """
from kernels.gpu import aot
from kernels.gpu.examples import meta
from kernels.gpu.launch import launch, recording
from kernels.small_m_matmul.triton import small_m_matmul

x = meta(2048, 2048)
with recording() as record:
    launch(
        small_m_matmul, (16, 8), x, x, None, x, 2048, 2048, 2048, HAS_BIAS=False, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64,
        EVEN_K=True, PRECISION="tf32", num_warps=4, num_stages=3,
    )
try:
    aot.compile_launch(record[0], 90)
except aot.KernelSpills as error:
    print(error)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(paths.ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=paths.ROOT, timeout=280
    )


def records(out: Path, *arguments: str) -> list[dict[str, Any]]:
    done = python("-m", "kernels.gpu.aot", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def test_every_kernel_compiles_for_both_capabilities_without_spilling(tmp_path: Path) -> None:
    found = records(tmp_path / "kernels.json", "--quick")
    assert {(r["kernel"], r["capability"]) for r in found} == {(k, c) for k in kernel_names() for c in aot.CAPABILITIES}
    assert all(0 < r["registers"] <= 255 and r["spills"] == 0 and r["shared"] <= 227 * 1024 for r in found)


@pytest.mark.slow
def test_every_example_compiles_as_recorded(tmp_path: Path) -> None:
    """`kernels/gpu/compiled.json` is what the compiler says. Another Triton may say otherwise: then the kernels are the same."""
    found = {(r["kernel"], r["capability"], r["variant"]) for r in records(tmp_path / "kernels.json")}
    recorded = json.loads((paths.ROOT / "kernels" / "gpu" / "compiled.json").read_text())
    assert found == {(r["kernel"], r["capability"], r["variant"]) for r in recorded}
    assert not any(r["spills"] for r in recorded)


def kernel_names() -> set[str]:
    """Every kernel in the sources of the operators: what a launch in their calling code names first."""
    import re

    sources = (paths.ROOT / "kernels").glob("*/triton.py")
    return {name for source in sources for name in re.findall(r"launch\(\s*(\w+),", source.read_text())}


def test_a_kernel_that_spills_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spilling.py").write_text(SPILLING)
    done = python(str(tmp_path / "spilling.py"))
    assert "small_m_matmul on sm_90 spills" in done.stdout and "take smaller blocks or more warps" in done.stdout, (
        done.stderr
    )


def test_the_refusal_names_kernel_and_bytes() -> None:
    record = aot.Record("k", 90, "bf16", 255, 0, 16, 4, 0.1)
    with pytest.raises(aot.KernelSpills, match="k on sm_90 spills 16 bytes"):
        aot.refuse_spills(record)


def test_an_interpreted_kernel_is_not_taken_for_compiled() -> None:
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        aot.measure(aot.Launch(None, (), {}, {}), 90)
