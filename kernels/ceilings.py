"""What this machine can do at most, measured: bytes read and copied, products computed, the cost of a dispatch.

    python -m kernels.ceilings --out FILE [--threads N]

Torch-free to import; the measuring happens in a process of its own. Rates are the best of several short repeats, because a
ceiling is an upper bound and other work only ever lowers a repeat; the medians stand beside them. Keys:

    read_gbs, copy_gbs (1e9 bytes a second; copy counts bytes read plus written), read_gbs_median
    gemm_bf16_flops, gemm_f32_flops (the best that any path reached), gemm_bf16_by_rows, gemm_f32_by_rows (torch, by rows of x)
    gemv_bf16_gbs (torch, weight bytes at one row), dispatch_s (one small torch operator)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels import build, registry
from kernels.hardware import detect

SCHEMA = 1
READ_BYTES = 256 << 20  # far past any last-level cache of a small machine
ROWS = (1, 8, 64, 512)
WIDTH = 1536  # n and k of the matrix products
REPEATS = 7
TIME_LIMIT_S = 300.0


class CeilingsError(RuntimeError):
    """The measuring process failed; the message holds the end of what it said."""


def measure_ceilings(threads: int = 0) -> dict[str, Any]:
    """Measures in a fresh process with `threads` threads (0: all cores). Raises CeilingsError."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ceilings.json"
        command = [sys.executable, "-m", "kernels.ceilings", "--out", str(out), "--threads", str(threads)]
        root = Path(__file__).resolve().parent.parent
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CeilingsError(f"measuring took over {TIME_LIMIT_S:g} s: the machine is overloaded") from error
        if done.returncode or not out.exists():
            raise CeilingsError(f"measuring failed ({done.returncode}): {done.stderr[-2000:]}")
        return json.loads(out.read_text())


def cached_ceilings(data_dir: Path, threads: int = 0) -> dict[str, Any]:
    """The ceilings of this machine and boot from `data_dir`/ceilings.json, measured when they are not there."""
    path = Path(data_dir) / "ceilings.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}
    wanted = identity(threads)
    if isinstance(found, dict) and {k: found.get(k) for k in wanted} == wanted:
        return found
    measured = measure_ceilings(threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    build.write_atomically(path, json.dumps(measured, indent=2).encode())
    return measured


def identity(threads: int) -> dict[str, Any]:
    """What a stored measurement must agree with to be used."""
    return {"schema": SCHEMA, "cpu": build.cpu_identity(), "boot": boot_id(), "threads": threads or detect().cores}


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def seconds(f: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Wall times of `repeats` calls after one that is not counted, sorted."""
    f()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return sorted(times)


def measure_here(threads: int, builds: Path) -> dict[str, Any]:
    """All ceilings, in this process."""
    import torch

    torch.set_num_threads(threads)
    result: dict[str, Any] = {"method": "c++ and torch" if build.has_compiler() else "torch"}
    result |= memory_with_torch()
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        rates = {str(rows): gemm_rate(rows, dtype) for rows in ROWS}
        result[f"gemm_{name}_by_rows"] = rates
        result[f"gemm_{name}_flops"] = max(rates.values())
    result["gemv_bf16_gbs"] = gemv_gbs()
    result["dispatch_s"] = dispatch_seconds()
    for key, value in with_compiler(threads, builds).items():
        result[key] = max(value, result.get(key, 0.0))
    return result


def memory_with_torch() -> dict[str, float]:
    import torch

    x = torch.ones(READ_BYTES // 4)
    y = torch.ones_like(x)
    read, copy = seconds(x.sum), seconds(lambda: y.copy_(x))
    middle = len(read) // 2
    return {
        "read_gbs": READ_BYTES / read[0] / 1e9,
        "read_gbs_median": READ_BYTES / read[middle] / 1e9,
        "copy_gbs": 2 * READ_BYTES / copy[0] / 1e9,
    }


def gemm_rate(rows: int, dtype: Any) -> float:
    """Operations a second of torch's linear layer, weights and inputs in cache."""
    import torch
    from torch.nn import functional as F

    x, w = torch.randn(rows, WIDTH, dtype=dtype), torch.randn(WIDTH, WIDTH, dtype=dtype)
    each = 2 * rows * WIDTH * WIDTH
    calls = max(1, min(200, int(4e9 / each)))
    with torch.inference_mode():
        return calls * each / seconds(lambda: [F.linear(x, w) for _ in range(calls)])[0]


def gemv_gbs() -> float:
    """Weight bytes a second of torch's linear layer at one row, over more weights than any cache holds."""
    import torch
    from torch.nn import functional as F

    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(32)]
    x = torch.randn(1, WIDTH, dtype=torch.bfloat16)
    with torch.inference_mode():
        times = seconds(lambda: [F.linear(x, w) for w in weights])
    return sum(w.nbytes for w in weights) / times[len(times) // 2] / 1e9


def dispatch_seconds() -> float:
    import torch

    x = torch.ones(8)
    with torch.inference_mode():
        times = seconds(lambda: [x + x for _ in range(500)])
    return times[len(times) // 2] / 500


def with_compiler(threads: int, builds: Path) -> dict[str, float]:
    """What compiled loops reach; empty without a compiler."""
    import torch

    source = builds / "ceilings.cpp"
    builds.mkdir(parents=True, exist_ok=True)
    source.write_text(registry.inlined(registry.ROOT / "common" / "ceilings.cpp"))
    built = build.compile_cpp(source, out_dir=builds)
    if built.path is None:
        return {}
    library, i64, pointer = ctypes.CDLL(str(built.path)), ctypes.c_int64, ctypes.c_void_p
    x, y = torch.empty(READ_BYTES // 4), torch.empty(READ_BYTES // 4)
    for tensor in (x, y):
        library.use_large_pages(pointer(tensor.data_ptr()), i64(tensor.nbytes))
        tensor.fill_(1.0)
    read = seconds(lambda: library.read_all(pointer(x.data_ptr()), i64(x.nbytes), i64(threads)))
    copy = seconds(lambda: library.copy_all(pointer(y.data_ptr()), pointer(x.data_ptr()), i64(x.nbytes), i64(threads)))
    rounds = 2_000_000
    products = {
        kind: seconds(lambda k=kind: library.dot_rounds(i64(rounds), i64(threads), i64(k)))[0] for kind in (0, 1)
    }
    return {
        "read_gbs": x.nbytes / read[0] / 1e9,
        "read_gbs_median": x.nbytes / read[len(read) // 2] / 1e9,
        "copy_gbs": 2 * x.nbytes / copy[0] / 1e9,
        "gemm_f32_flops": rounds * 12 * 16 * 2 * threads / products[0],
        "gemm_bf16_flops": rounds * 12 * 32 * 2 * threads / products[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures this machine's ceilings.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_here(given.threads or detect().cores, Path(folder))
    build.write_atomically(given.out, json.dumps({**identity(given.threads), **measured}, indent=2).encode())


if __name__ == "__main__":
    main()
