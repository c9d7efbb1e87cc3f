"""The builder: by content, cached (failures too), bounded, with one OpenMP runtime in the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build
from kernels.late import with_values
from tests import paths
from tests.kernels.support import write_source

GOOD = '#include "answer.hpp"\nextern "C" int answer() { return ANSWER + EXTRA; }\n'


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "answer.hpp").write_text("#define ANSWER 40\n")
    return folder


def compile_good(tmp_path: Path, headers: Path, extra: str = "2") -> build.BuildResult:
    source = write_source(tmp_path, GOOD)
    return build.compile_cpp(source, include=[headers], defines={"EXTRA": extra}, out_dir=tmp_path / "out")


def test_it_compiles_once_for_one_content(tmp_path: Path, headers: Path) -> None:
    first, second = compile_good(tmp_path, headers), compile_good(tmp_path, headers)
    assert first.ok and not first.cached and second.cached and first.path == second.path
    assert ctypes.CDLL(str(first.path)).answer() == 42


def test_a_define_or_a_header_makes_another_library(tmp_path: Path, headers: Path) -> None:
    paths_seen = {compile_good(tmp_path, headers).path, compile_good(tmp_path, headers, "3").path}
    (headers / "answer.hpp").write_text("#define ANSWER 50\n")
    changed = compile_good(tmp_path, headers)
    assert not changed.cached and ctypes.CDLL(str(changed.path)).answer() == 52
    assert len({*paths_seen, changed.path}) == 3


def test_a_failure_is_cached_with_its_log(tmp_path: Path) -> None:
    source = write_source(tmp_path, "int broken( {\n")
    first = build.compile_cpp(source, out_dir=tmp_path)
    second = build.compile_cpp(source, out_dir=tmp_path)
    assert not first.ok and first.path is None and "error" in first.log
    assert second.cached and not second.ok and second.log == first.log


def test_a_damaged_or_missing_result_is_built_again(tmp_path: Path, headers: Path) -> None:
    first = compile_good(tmp_path, headers)
    assert first.path is not None
    first.path.unlink()
    again = compile_good(tmp_path, headers)
    assert again.ok and not again.cached
    first.path.with_suffix(".json").write_text("{half")
    assert not compile_good(tmp_path, headers).cached


def test_a_compile_that_takes_too_long_is_stopped_and_not_cached(tmp_path: Path) -> None:
    source = write_source(tmp_path, '#include <regex>\nint x = std::regex_match("", std::regex("a"));\n')
    slow = build.compile_cpp(source, out_dir=tmp_path, time_limit_s=0.01)
    assert not slow.ok and "stopped after 0.01 s" in slow.log
    assert list(tmp_path.glob("*.json")) == []


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    result = build.compile_cpp(write_source(tmp_path, "int x;\n"), out_dir=tmp_path)
    assert not build.has_compiler() and not result.ok and "install g++" in result.log


def test_no_half_written_library_is_left_behind(tmp_path: Path) -> None:
    build.compile_cpp(write_source(tmp_path, "int broken( {\n"), out_dir=tmp_path / "out")
    assert [p.suffix for p in (tmp_path / "out").iterdir() if p.is_file()] == [".json"]


def test_the_process_holds_one_openmp_runtime(tmp_path: Path) -> None:
    source = write_source(tmp_path, '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n')
    library = build.compile_cpp(source, out_dir=tmp_path).path
    assert library is not None
    code = (
        "import ctypes, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "assert ctypes.CDLL(sys.argv[1]).threads() == 1, 'torch and the library do not share their threads'\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libomp' in line}\n"
        "assert len(maps) == 1, maps\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)], capture_output=True, text=True, cwd=paths.ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_building_and_describing_never_import_torch() -> None:
    code = "import sys, kernels.build, kernels.registry, kernels.hardware, kernels.ceilings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, check=False).returncode == 0


def test_transformers_imports_beside_our_kernels_package() -> None:
    code = "import transformers, transformers.models.llama.modeling_llama, kernels; assert 'polymorph' not in kernels.__name__"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_toolchain_line_names_compiler_cpu_and_flags() -> None:
    line = build.toolchain()
    assert "-march=native" in line and build.cpu_identity() in line


LINKER_ID = 20  # bytes
LATE_TEXT = (
    'extern "C" { long PM_ONE = 3; }  // read at run time\n#define PM_ONE PM_ONE\n'
    'extern "C" { long PM_FAR = -7; }\n'
    'extern "C" int f() { return int(PM_ONE) + int(PM_FAR) + NUMBER; }\n'
)


def compile_late(tmp_path: Path, one: int, number: str) -> build.BuildResult:
    text = LATE_TEXT.replace("= 3", f"= {one}").replace("NUMBER", number)
    return build.compile_cpp(write_source(tmp_path, text), out_dir=tmp_path / "out")


def test_values_read_at_run_time_share_one_compilation(tmp_path: Path) -> None:
    first = compile_late(tmp_path, 3, "1")
    assert first.ok and not first.cached and ctypes.CDLL(str(first.path)).f() == -3
    other = compile_late(tmp_path, 30, "1")
    assert other.cached and other.path != first.path and ctypes.CDLL(str(other.path)).f() == 24
    assert len(list((tmp_path / "out").glob("*.json"))) == 1, "records are of what the compiler made"
    changed = compile_late(tmp_path, 3, "2")
    assert not changed.cached and ctypes.CDLL(str(changed.path)).f() == -2
    assert not compile_late(tmp_path, 3, "(").ok


@pytest.mark.parametrize("one", [3, -1, 2**40])
def test_a_written_library_is_what_the_compiler_makes_of_those_values(tmp_path: Path, one: int) -> None:
    source = write_source(tmp_path, LATE_TEXT.replace("= 3", f"= {one}").replace("NUMBER", "1"))
    path = build.compiler()
    assert path
    made, ours = tmp_path / "plain.so", compile_late(tmp_path, one, "1").path
    build.run_command([path, "-o", str(made), str(source), *build.command_flags((), {}, True)], 60)
    assert ours and len(made.read_bytes()) == len(ours.read_bytes())
    others = sum(a != b for a, b in zip(made.read_bytes(), ours.read_bytes(), strict=True))
    assert others <= LINKER_ID, "nothing differs but the linker's own name for it"
    assert ctypes.c_long.in_dll(ctypes.CDLL(str(ours)), "PM_ONE").value == one


@pytest.mark.parametrize("text", ["static long PM_ONE = 3;", "extern \"C\" { int PM_ONE = 3; }", "extern \"C\" { long PM_ONE; }"])
def test_what_a_library_does_not_hold_is_not_written(tmp_path: Path, text: str) -> None:
    made = build.compile_cpp(write_source(tmp_path, f"{text}\n"), out_dir=tmp_path).path
    assert made and with_values(made.read_bytes(), {"PM_ONE": 4}) is None


def test_damaged_libraries_are_refused(tmp_path: Path) -> None:
    made = compile_late(tmp_path, 3, "1").path
    assert made
    whole = made.read_bytes()
    assert with_values(whole, {"PM_ONE": 3}) == whole
    for cut in range(0, len(whole), 997):
        assert with_values(whole[:cut], {"PM_ONE": 3}) is None
    assert with_values(b"MZ" + whole[2:], {"PM_ONE": 3}) is None


def test_a_value_that_the_library_does_not_offer_is_compiled_in(tmp_path: Path) -> None:
    text = '#if 0\nextern "C" { long PM_ONE = 3; }\n#endif\nextern "C" int f() { return 5; }\n'
    made = build.compile_cpp(write_source(tmp_path, text), out_dir=tmp_path / "out")
    assert made.ok and ctypes.CDLL(str(made.path)).f() == 5
