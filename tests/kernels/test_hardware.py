"""The machine as data, and ceilings measured once per boot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels import ceilings, hardware


def test_it_describes_this_machine() -> None:
    found = hardware.detect()
    assert found.name and found.cores >= 1 and found.memory > 1 << 28
    assert list(found.features) == sorted(found.features)


def test_datasheets_are_labelled_as_such() -> None:
    sheets = hardware.datasheets()
    assert sheets and all(s.provenance == "datasheet" and s.source and s.read_gbs > 0 for s in sheets.values())


def test_ceilings_are_measured_once_and_read_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ceilings.cached_ceilings(tmp_path, threads=1)
    for key in ("read_gbs", "copy_gbs", "gemm_bf16_flops", "gemm_f32_flops", "gemv_bf16_gbs", "dispatch_s"):
        assert isinstance(first[key], float) and first[key] > 0, key
    assert first["read_gbs_median"] <= first["read_gbs"] and first["threads"] == 1

    def never(threads: int) -> dict[str, float]:
        raise AssertionError("measured twice")

    monkeypatch.setattr(ceilings, "measure_ceilings", never)
    assert ceilings.cached_ceilings(tmp_path, threads=1) == first


def test_ceilings_of_another_boot_or_a_damaged_file_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = {**ceilings.identity(1), "read_gbs": 1.0}
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda threads: fresh)
    file = tmp_path / "ceilings.json"
    for stale in (
        json.dumps({**fresh, "boot": "another", "read_gbs": 2.0}),
        json.dumps({**fresh, "threads": 9}),
        "{half",
        "[]",
    ):
        file.write_text(stale)
        assert ceilings.cached_ceilings(tmp_path, threads=1)["read_gbs"] == 1.0


def test_a_failed_measurement_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings.sys, "executable", "/bin/false")
    with pytest.raises(ceilings.CeilingsError, match="measuring failed"):
        ceilings.measure_ceilings(1)
