"""Compiles C++ sources to shared libraries, by content hash. Torch-free.

A build is named by everything that can change its bytes: source, headers, flags, defines, compiler version and CPU. Failures are
cached as well as successes, so that a source that cannot compile costs its time once. OpenMP is linked against the very
runtime that torch ships, so that a process holds one pool of threads.

Values that a source reads at run time (lines like `extern "C" { long PM_SPIN = 4000; }`) are written into a copy of the
library: programs that differ in those alone are compiled once (`kernels.late`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kernels.late import with_values

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-s", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
TIME_LIMIT_S = 120.0
LOG_LIMIT = 16_384
PRELUDE = """#pragma once
#include <atomic>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <thread>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
"""  # what kernels include: parsed once for all of them
LATE_VALUE = re.compile(r'^extern "C" \{ long (\w+) = (-?\d+); \}.*$', re.MULTILINE)
UNSET = r'extern "C" { long \1 = 1; }'  # not 0: what is zero has no bytes in the file
Compiler = Callable[[Sequence[str], float], tuple[int, str]]  # command, seconds -> exit status, what it said


@dataclass(frozen=True, slots=True)
class BuildResult:
    """`path` is None exactly when `ok` is False; `log` then holds what the compiler said (or why it never ran)."""

    path: Path | None
    log: str
    seconds: float
    cached: bool
    ok: bool


@cache
def compiler() -> str | None:
    """The C++ compiler (`$CXX`, else g++, else clang++), or None."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def has_compiler() -> bool:
    return compiler() is not None


@cache
def compiler_version(path: str) -> str:
    out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return out.stdout.splitlines()[0] if out.stdout else path


@cache
def toolchain() -> str:
    """Compiler, CPU and flags in one line: what an artifact hash must cover besides its sources."""
    path = compiler()
    return " | ".join((compiler_version(path) if path else "no compiler", cpu_identity(), " ".join(FLAGS)))


@cache
def cpu_identity() -> str:
    """The CPU's name and features: `-march=native` means another thing on another CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    features = named.get("flags") or named.get("Features", "")
    return f"{named.get('model name', platform.machine())} {hashlib.sha256(features.encode()).hexdigest()[:12]}"


@cache
def openmp_library() -> Path | None:
    """The OpenMP runtime inside the torch package (found without importing it), or None to take the compiler's own."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for root in (Path(folder) / "lib", Path(folder).parent / "torch.libs"):
            found = sorted(root.glob("libgomp*.so*"))
            if found:
                return found[0]
    return None


def openmp_flags() -> list[str]:
    library = openmp_library()
    if library is None:
        return ["-fopenmp"]
    return ["-fopenmp", f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]


def compile_cpp(
    source: Path,
    *,
    include: Sequence[Path] = (),
    defines: Mapping[str, str] | None = None,
    out_dir: Path,
    openmp: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
    run: Compiler | None = None,
) -> BuildResult:
    """Compiles one source to `out_dir/<stem>-<hash>.so`, or returns what an earlier call made or failed to make.

    `include` are folders of headers; all their headers count in the hash. `run` runs the compiler's commands (None: here and
    now). Never raises for a source that is wrong.
    """
    start = time.perf_counter()
    path = compiler()
    if path is None:
        return BuildResult(None, "no C++ compiler: install g++ or set CXX", 0.0, False, False)
    text = source.read_bytes().decode(errors="surrogateescape")
    beside = source.parent if LOCAL_INCLUDE.search(text) else None
    job = Job(source.stem, include, beside, defines or {}, openmp, out_dir, time_limit_s, run or run_command)
    out_dir.mkdir(parents=True, exist_ok=True)
    values = {name: int(value) for name, value in LATE_VALUE.findall(text)}
    if not values:
        return job.make(text, start)
    shared = job.make(LATE_VALUE.sub(UNSET, text), start)
    if shared.path is None:
        return shared
    written = with_values(shared.path.read_bytes(), values)
    if written is None:
        return job.make(text, start)
    made = out_dir / f"{source.stem}-{hashlib.sha256(written).hexdigest()[:24]}.so"
    if not made.exists():
        write_atomically(made, written)
    return BuildResult(made, shared.log, time.perf_counter() - start, shared.cached, True)


LOCAL_INCLUDE = re.compile(r'^\s*#\s*include\s+"', re.MULTILINE)


@dataclass(slots=True)
class Job:
    """How the sources of one library are compiled."""

    stem: str
    include: Sequence[Path]
    beside: Path | None  # where headers named in quotes lie
    defines: Mapping[str, str]
    openmp: bool
    out_dir: Path
    time_limit_s: float
    run: Compiler

    def make(self, text: str, start: float) -> BuildResult:
        """A library of this text, named by its content."""
        path = compiler()
        assert path is not None
        near = [self.beside] if self.beside else []
        arguments = command_flags([*near, *self.include], self.defines, self.openmp)
        headers = [p.read_text(errors="replace") for folder in near for p in sorted(folder.glob("*.h*"))]
        key = build_key(text, self.include, [*arguments, PRELUDE, *headers], path)
        made, record = (self.out_dir / f"{self.stem}-{key}{end}" for end in (".so", ".json"))
        cached = read_record(record, made)
        if cached is not None:
            seconds = time.perf_counter() - start
            return BuildResult(made if cached["ok"] else None, cached["log"], seconds, True, cached["ok"])
        try:
            ok, log, keep = self._compile(path, text, [*self._prelude(path), *arguments], made)
        except subprocess.TimeoutExpired:
            said = f"the compiler was stopped after {self.time_limit_s:g} s: simplify the source or raise the limit"
            ok, log, keep = False, said, False
        seconds = time.perf_counter() - start
        if keep:
            write_atomically(record, json.dumps({"ok": ok, "log": log, "seconds": seconds}).encode())
        return BuildResult(made if ok else None, log, seconds, False, ok)

    def _prelude(self, path: str) -> list[str]:
        """Flags that put PRELUDE before the source, parsed in advance where the compiler is GCC; nothing elsewhere."""
        if not Path(path).name.startswith("g++"):
            return []
        flags = command_flags((), {}, self.openmp)
        folder = self.out_dir / f"prelude-{build_key(PRELUDE, (), flags, path)}"
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=self.out_dir) as staging:
                header = Path(staging) / "prelude" / "prelude.hpp"
                header.parent.mkdir()
                header.write_text(PRELUDE)
                command = [path, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
                if self.run(command, self.time_limit_s)[0] != 0:
                    return []
                with contextlib.suppress(OSError):  # someone else may have made it first
                    header.parent.rename(folder)
        return ["-include", str(folder / "prelude.hpp")]

    def _compile(self, path: str, text: str, arguments: Sequence[str], made: Path) -> tuple[bool, str, bool]:
        """(worked, log, whether it may be cached: running out of time says more of the machine than of the source)."""
        with tempfile.TemporaryDirectory(dir=self.out_dir) as folder:
            source, target = Path(folder) / f"{self.stem}.cpp", Path(folder) / "made.so"
            source.write_bytes(text.encode(errors="surrogateescape"))
            status, log = self.run([path, "-o", str(target), str(source), *arguments], self.time_limit_s)
            if status == 0:
                target.chmod(0o755)
                target.replace(made)
            return status == 0, log.replace(f"{folder}/", "")[-LOG_LIMIT:], status >= 0


def run_command(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Exit status and output. Raises subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL, errors="replace"
    )
    return done.returncode, done.stdout + done.stderr


def command_flags(include: Iterable[Path], defines: Mapping[str, str], openmp: bool) -> list[str]:
    flags = [*FLAGS, *(f"-I{folder}" for folder in include)]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return flags + (openmp_flags() if openmp else [])


def build_key(text: str, include: Iterable[Path], arguments: Iterable[str], compiler_path: str) -> str:
    """A hash over length-delimited fields, so that no two inputs run together."""
    digest = hashlib.sha256()
    headers = [p for folder in include for p in sorted(folder.rglob("*")) if p.suffix in {".h", ".hpp", ".inc"}]
    texts = [text.encode(errors="surrogateescape"), *(p.read_bytes() for p in headers)]
    fields = [*arguments, compiler_version(compiler_path), cpu_identity(), *(p.name for p in headers)]
    for item in [*texts, *(field.encode() for field in fields)]:
        digest.update(len(item).to_bytes(8, "little") + item)
    return digest.hexdigest()[:24]


def read_record(record: Path, library: Path) -> dict | None:
    """What an earlier build left, or None when there is none that can be used."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    usable = isinstance(found, dict) and {"ok", "log"} <= found.keys() and (not found["ok"] or library.exists())
    return found if usable else None


def write_atomically(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as out:
        out.write(data)
    os.replace(name, path)
