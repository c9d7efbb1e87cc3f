"""Compiles C++ sources to shared libraries, by content hash. Torch-free.

A build is named by everything that can change its bytes: source, headers, flags, defines, compiler version and CPU. Failures are
cached as well as successes, so that a source that cannot compile costs its time once. OpenMP is linked against the very
runtime that torch ships, so that a process holds one pool of threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
TIME_LIMIT_S = 120.0
LOG_LIMIT = 16_384


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
) -> BuildResult:
    """Compiles one source to `out_dir/<stem>-<hash>.so`, or returns what an earlier call made or failed to make.

    `include` are folders of headers; all their headers count in the hash. Never raises for a source that is wrong.
    """
    start = time.perf_counter()
    path = compiler()
    if path is None:
        return BuildResult(None, "no C++ compiler: install g++ or set CXX", 0.0, False, False)
    arguments = command_flags(include, defines or {}, openmp)
    key = build_key(source, include, arguments, path)
    out_dir.mkdir(parents=True, exist_ok=True)
    library, record = out_dir / f"{source.stem}-{key}.so", out_dir / f"{source.stem}-{key}.json"
    cached = read_record(record, library)
    if cached is not None:
        return BuildResult(
            library if cached["ok"] else None, cached["log"], time.perf_counter() - start, True, cached["ok"]
        )
    ok, log, keep = run_compiler([path, *arguments, str(source)], library, time_limit_s)
    seconds = time.perf_counter() - start
    if keep:
        write_atomically(record, json.dumps({"ok": ok, "log": log, "seconds": seconds}).encode())
    return BuildResult(library if ok else None, log, seconds, False, ok)


def command_flags(include: Iterable[Path], defines: Mapping[str, str], openmp: bool) -> list[str]:
    flags = [*FLAGS, *(f"-I{folder}" for folder in include)]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return flags + (openmp_flags() if openmp else [])


def build_key(source: Path, include: Iterable[Path], arguments: Iterable[str], compiler_path: str) -> str:
    """A hash over length-delimited fields, so that no two inputs run together."""
    digest = hashlib.sha256()
    headers = [p for folder in include for p in sorted(folder.rglob("*")) if p.suffix in {".h", ".hpp", ".inc"}]
    texts = [source.read_bytes(), *(p.read_bytes() for p in headers)]
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


def run_compiler(command: list[str], library: Path, time_limit_s: float) -> tuple[bool, str, bool]:
    """(worked, log, whether the outcome may be cached: running out of time says more of the machine than of the source)."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    made = Path(name)
    try:
        done = subprocess.run(
            [*command[:1], "-o", str(made), command[-1], *command[1:-1]],
            capture_output=True, text=True, timeout=time_limit_s, check=False, stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
        if done.returncode == 0:
            made.chmod(0o755)
            made.replace(library)
        return done.returncode == 0, (done.stdout + done.stderr)[-LOG_LIMIT:], done.returncode >= 0
    except subprocess.TimeoutExpired:
        return (
            False,
            f"the compiler was stopped after {time_limit_s:g} s: simplify the source or raise the limit",
            False,
        )
    finally:
        made.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as out:
        out.write(data)
    os.replace(name, path)
