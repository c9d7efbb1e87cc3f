"""What this machine can do at most, measured: bytes read and copied, products computed, the cost of meeting and starting.

    python -m kernels.ceilings [--threads N] [--data DIR] [--fresh]     a table, measured once per machine and boot
    python -m kernels.ceilings --out FILE [--threads N]                 measured in this process, as JSON

Torch-free to import; the measuring (`kernels.microbenchmarks`) happens in a process of its own. Keys:

    read_gbs, copy_gbs (1e9 bytes a second; copy counts bytes read plus written), read_gbs_median
    gemv_f32_gbs, gemv_bf16_gbs, gemv_int8_gbs (weight bytes at one row, the best that any path reached)
    gemm_f32_flops, gemm_bf16_flops, gemm_int8_flops (operations a second, likewise), gemm_f32_by_rows, gemm_bf16_by_rows
    (torch, by rows of x)
    barrier_s (all threads meet), region_s (threads start and end), dispatch_s (one small torch operator)
    cuda (the GPU's name), cuda_read_gbs, cuda_copy_gbs, cuda_gemm_f32_flops, cuda_gemm_bf16_flops where there is one

Without a C++ compiler there are no int8 products, barriers or regions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels import build
from kernels.hardware import detect
from kernels.microbenchmarks import measure_here

SCHEMA = 2
TIME_LIMIT_S = 300.0
TABLE = (  # key, words, unit, how many of the unit one is
    ("read_gbs", "memory read", "GB/s", 1.0),
    ("copy_gbs", "memory copied, read plus written", "GB/s", 1.0),
    ("gemv_f32_gbs", "matrix x vector, float32", "GB/s", 1.0),
    ("gemv_bf16_gbs", "matrix x vector, bfloat16", "GB/s", 1.0),
    ("gemv_int8_gbs", "matrix x vector, int8", "GB/s", 1.0),
    ("gemm_f32_flops", "products, float32", "Gop/s", 1e-9),
    ("gemm_bf16_flops", "products, bfloat16", "Gop/s", 1e-9),
    ("gemm_int8_flops", "products, int8", "Gop/s", 1e-9),
    ("barrier_s", "barrier of all threads", "us", 1e6),
    ("region_s", "threads start and end", "us", 1e6),
    ("dispatch_s", "one small torch operator", "us", 1e6),
    ("cuda_read_gbs", "GPU memory read", "GB/s", 1.0),
    ("cuda_copy_gbs", "GPU memory copied, read plus written", "GB/s", 1.0),
    ("cuda_gemm_f32_flops", "GPU products, float32", "Gop/s", 1e-9),
    ("cuda_gemm_bf16_flops", "GPU products, bfloat16", "Gop/s", 1e-9),
)


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


def cached_ceilings(data_dir: Path, threads: int = 0, fresh: bool = False) -> dict[str, Any]:
    """The ceilings of this machine and boot from `data_dir`/ceilings.json, measured when they are not there or with `fresh`."""
    path = Path(data_dir) / "ceilings.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}
    wanted = identity(threads)
    if not fresh and isinstance(found, dict) and {k: found.get(k) for k in wanted} == wanted:
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


def table(ceilings: Mapping[str, Any]) -> str:
    """The figures for people; what was not measured has no line."""
    threads = ceilings["threads"]
    lines = [f"{detect().name}, {threads} thread{'s' * (threads != 1)}, measured with {ceilings['method']}"]
    lines += [f"GPU: {ceilings['cuda']}"] if "cuda" in ceilings else []
    for key, words, unit, factor in TABLE:
        if key in ceilings:
            lines.append(f"  {words:<38}{ceilings[key] * factor:>12,.2f} {unit}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures this machine's ceilings.")
    parser.add_argument("--out", type=Path, help="measure in this process and write JSON here")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("POLYMORPH_DATA", "data"), help="data folder that keeps the figures"
    )
    parser.add_argument("--fresh", action="store_true", help="measure even if this boot was measured")
    given = parser.parse_args(arguments)
    if given.out is None:
        print(table(cached_ceilings(given.data, given.threads, given.fresh)))
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_here(given.threads or detect().cores, Path(folder))
    build.write_atomically(given.out, json.dumps({**identity(given.threads), **measured}, indent=2).encode())


if __name__ == "__main__":
    main()
