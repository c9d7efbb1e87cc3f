"""The machine as data, and ceilings measured once per boot."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import build, ceilings, hardware, microbenchmarks
from tests import paths


def test_it_describes_this_machine() -> None:
    found = hardware.detect()
    assert found.name and found.cores >= 1 and found.memory > 1 << 28
    assert list(found.features) == sorted(found.features)


DRIVER = """
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return COUNT > ordinal ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) {
  const char *told = device == 7 ? "NVIDIA H200" : "another";
  int i = 0;
  for (; told[i] && i < length - 1; i++) name[i] = told[i];
  name[i] = 0;
  return 0;
}
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 150754820096ul; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : -1;
  return 0;
}
"""


def driver(folder: Path, **macros: int) -> str:
    """A shared library with the CUDA driver's interface."""
    path = build.compiler()
    if path is None:
        pytest.skip("no C++ compiler")
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    source, library = folder / "driver.c", folder / f"driver-{'-'.join(map(str, macros.values()))}.so"
    source.write_text(DRIVER)
    subprocess.run([path, "-x", "c", "-shared", "-fPIC", *defines, "-o", str(library), str(source)], check=True)
    return str(library)


def test_a_gpu_is_known_by_what_its_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CUDA_DRIVER", driver(tmp_path, FAILS=0, COUNT=1))
    found = hardware.cuda_gpu()
    assert found == hardware.Gpu("NVIDIA H200", (9, 0), 150754820096, 132)
    assert str(found) == "NVIDIA H200 (compute capability 9.0)"


@pytest.mark.parametrize("macros", [{"FAILS": 100, "COUNT": 1}, {"FAILS": 0, "COUNT": 0}])
def test_a_driver_without_a_device_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, macros: dict[str, int]
) -> None:
    monkeypatch.setattr(hardware, "CUDA_DRIVER", driver(tmp_path, **macros))
    assert hardware.cuda_gpu() is None


def test_a_machine_without_the_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CUDA_DRIVER", "libno-such-driver.so.1")
    assert hardware.cuda_gpu() is None


def test_datasheets_are_labelled_as_such() -> None:
    sheets = hardware.datasheets()
    assert sheets and all(s.provenance == "datasheet" and "https://" in s.source for s in sheets.values())


def test_specifications_are_of_dense_products_and_agree_with_each_other() -> None:
    sheets = hardware.datasheets()
    devices = ("H100 SXM", "H200 SXM", "B200", "GB200", "B300", "GB300")
    assert {f"NVIDIA {d}" for d in devices} | {"AWS Trainium2"} <= set(sheets)
    for sheet in sheets.values():
        assert 0 < sheet.gemm_f32_flops < sheet.gemm_bf16_flops, sheet.name
        # eight bits twice as fast: a sparse rate in one of the two columns would make it 4 or 1
        assert 1.9 < sheet.gemm_fp8_flops / sheet.gemm_bf16_flops < 2.1, sheet.name
        assert sheet.gemm_fp4_flops is None or 1.9 < sheet.gemm_fp4_flops / sheet.gemm_fp8_flops < 3.1, sheet.name
        assert 50e9 < sheet.memory < 400e9 and 1000 < sheet.read_gbs < 10000 and sheet.link_gbs > 500, sheet.name


def test_ceilings_are_measured_once_and_read_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ceilings.cached_ceilings(tmp_path, threads=1)
    for key, *_ in ceilings.TABLE:
        assert key.startswith("cuda") or (isinstance(first[key], float) and first[key] > 0), key
    for name in ("f32", "bf16"):
        assert max(first[f"gemm_{name}_by_rows"].values()) <= first[f"gemm_{name}_flops"]
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes at which nothing measured is a ceiling, but everything runs."""
    for name, value in {"READ_BYTES": 1 << 20, "ROWS": (1, 4), "WIDTH": 256, "ROUNDS": 100, "MEETINGS": 10}.items():
        monkeypatch.setattr(microbenchmarks, name, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_without_a_compiler_torch_alone_is_measured(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = microbenchmarks.measure_here(1, tmp_path)
    assert found["method"] == "torch"
    for key in ("read_gbs", "copy_gbs", "gemv_f32_gbs", "gemm_bf16_flops", "dispatch_s"):
        assert found[key] > 0
    assert not {"gemv_int8_gbs", "gemm_int8_flops", "barrier_s", "region_s"} & found.keys()
    assert "int8" not in ceilings.table({**found, "threads": 1})


@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_loops_compute_what_they_count(threads: int) -> None:
    loops, i64, pointer = microbenchmarks.library(paths.test_data() / "kernel-builds"), ctypes.c_int64, ctypes.c_void_p
    if loops is None:
        pytest.skip("no C++ compiler")
    for kind, dtype in enumerate((torch.float32, torch.bfloat16, torch.uint8)):
        w, x = torch.ones(9, 512).to(dtype), torch.full((512,), 2).to(dtype)
        loops.gemv.restype = ctypes.c_float
        assert (
            loops.gemv(pointer(w.data_ptr()), pointer(x.data_ptr()), i64(9), i64(512), i64(kind), i64(threads)) == 9216
        )
    loops.byte_rounds.restype = ctypes.c_float
    assert loops.byte_rounds(i64(10), i64(threads)) == 10 * 12 * 64 * threads
    loops.meet(i64(5), i64(threads))
    loops.start_threads(i64(5), i64(threads))


def test_the_command_prints_what_is_kept_and_measures_anew_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = iter((11.0, 12.0))
    monkeypatch.setattr(
        ceilings, "measure_ceilings", lambda n: {**ceilings.identity(n), "method": "torch", "read_gbs": next(reads)}
    )
    for arguments, want in (([], "11.00 GB/s"), ([], "11.00 GB/s"), (["--fresh"], "12.00 GB/s")):
        ceilings.main(["--threads", "1", "--data", str(tmp_path), *arguments])
        assert want in capsys.readouterr().out
