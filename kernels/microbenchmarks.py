"""What `kernels.ceilings` measures, in this process: memory, products, the cost of meeting and starting. Needs torch to run.

Rates are the best of several short repeats, because a ceiling is an upper bound and other work only ever lowers a repeat. Costs
are medians: a cost is paid every time, not at best.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels import build, registry

READ_BYTES = 256 << 20  # far past any last-level cache of a small machine
ROWS = (1, 8, 64, 512)
WIDTH = 1536  # n and k of the matrix products
REPEATS = 7
KINDS = {"f32": 4, "bf16": 2, "int8": 1}  # bytes an element, in the order of ceilings.cpp
PRODUCTS = {"f32": 16, "bf16": 32, "int8": 64}  # multiply-adds of one vector instruction
ROUNDS = 2_000_000  # of products
MEETINGS = 2_000


def seconds(f: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Wall times of `repeats` calls after one that is not counted, sorted."""
    f()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return sorted(times)


def best(f: Callable[[], Any]) -> float:
    return seconds(f)[0]


def median(f: Callable[[], Any]) -> float:
    return seconds(f)[REPEATS // 2]


def measure_here(threads: int, builds: Path) -> dict[str, Any]:
    """All ceilings, in this process; `builds` is a folder for the compiled loops."""
    import torch

    torch.set_num_threads(threads)
    with torch.inference_mode():
        result: dict[str, Any] = with_torch()
        compiled = with_compiler(threads, builds)
        gpu = with_gpu()
    for key, value in compiled.items():
        result[key] = max(value, result.get(key, 0.0))
    return {"method": "c++ and torch" if compiled else "torch", **result, **gpu}


def with_torch() -> dict[str, Any]:
    import torch

    result: dict[str, Any] = memory(
        torch.rand(READ_BYTES // 4)
    )  # random: pages that are alike may be one page to the system
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        rates = {str(rows): gemm_rate(rows, dtype) for rows in ROWS}
        result[f"gemm_{name}_by_rows"] = rates
        result[f"gemm_{name}_flops"] = max(rates.values())
        result[f"gemv_{name}_gbs"] = gemv_gbs(dtype)
    x = torch.ones(8)
    result["dispatch_s"] = median(lambda: [x + x for _ in range(500)]) / 500
    return result


def memory(x: Any) -> dict[str, float]:
    import torch

    y = torch.ones_like(x)
    return memory_rates(x.nbytes, x.sum, lambda: y.copy_(x))


def memory_rates(size: int, read: Callable[[], Any], copy: Callable[[], Any]) -> dict[str, float]:
    """GB/s of what reads and what copies `size` bytes; a copied byte is read and written."""
    reads = seconds(read)
    return {
        "read_gbs": size / reads[0] / 1e9,
        "read_gbs_median": size / reads[REPEATS // 2] / 1e9,
        "copy_gbs": 2 * size / best(copy) / 1e9,
    }


def gemm_rate(rows: int, dtype: Any) -> float:
    """Operations a second of torch's linear layer, weights and inputs in cache."""
    import torch
    from torch.nn import functional as F

    x, w = torch.randn(rows, WIDTH, dtype=dtype), torch.randn(WIDTH, WIDTH, dtype=dtype)
    each = 2 * rows * WIDTH * WIDTH
    calls = max(1, min(200, int(4e9 / each)))
    return calls * each / best(lambda: [F.linear(x, w) for _ in range(calls)])


def gemv_gbs(dtype: Any) -> float:
    """Weight bytes (1e9 a second) of torch's linear layer at one row, over more weights than a cache holds."""
    import torch
    from torch.nn import functional as F

    x, size = torch.ones(1, WIDTH, dtype=dtype), WIDTH * WIDTH * dtype.itemsize
    weights = [torch.rand(WIDTH, WIDTH, dtype=dtype) for _ in range(max(1, READ_BYTES // size))]
    return len(weights) * size / best(lambda: [F.linear(x, w) for w in weights]) / 1e9


def library(builds: Path) -> ctypes.CDLL | None:
    """The compiled loops; None without a compiler."""
    source = builds / "ceilings.cpp"
    builds.mkdir(parents=True, exist_ok=True)
    source.write_text(registry.inlined(registry.ROOT / "common" / "ceilings.cpp"))
    built = build.compile_cpp(source, out_dir=builds)
    return None if built.path is None else ctypes.CDLL(str(built.path))


def with_compiler(threads: int, builds: Path) -> dict[str, float]:
    """What compiled loops reach; empty without a compiler."""
    import torch

    loops, i64, pointer = library(builds), ctypes.c_int64, ctypes.c_void_p
    if loops is None:
        return {}
    x, y = torch.empty(READ_BYTES // 4), torch.empty(READ_BYTES // 4)
    for tensor in (x, y):
        loops.use_large_pages(pointer(tensor.data_ptr()), i64(tensor.nbytes))
        tensor.uniform_()
    a, b, size, team = pointer(x.data_ptr()), pointer(y.data_ptr()), i64(x.nbytes), i64(threads)
    result = memory_rates(x.nbytes, lambda: loops.read_all(a, size, team), lambda: loops.copy_all(b, a, size, team))
    for kind, (name, width) in enumerate(KINDS.items()):
        n = READ_BYTES // (WIDTH * width)
        time_s = best(lambda n=n, kind=kind: loops.gemv(a, b, i64(n), i64(WIDTH), i64(kind), team))
        result[f"gemv_{name}_gbs"] = n * WIDTH * width / time_s / 1e9
    products = {name: lambda k=k: loops.dot_rounds(i64(ROUNDS), team, i64(k)) for k, name in enumerate(("f32", "bf16"))}
    products["int8"] = lambda: loops.byte_rounds(i64(ROUNDS), team)
    for name, run in products.items():
        result[f"gemm_{name}_flops"] = 2 * 12 * PRODUCTS[name] * ROUNDS * threads / best(run)
    result["barrier_s"] = median(lambda: loops.meet(i64(MEETINGS), team)) / MEETINGS
    result["region_s"] = median(lambda: loops.start_threads(i64(MEETINGS), team)) / MEETINGS
    return result


def with_gpu() -> dict[str, Any]:
    """Memory and products of the first CUDA GPU, at sizes that fill it; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return {}

    def often(f: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: ([f() for _ in range(10)], torch.cuda.synchronize())

    x, y = (torch.ones(1 << 28, device="cuda") for _ in range(2))
    found = memory_rates(10 * x.nbytes, often(x.sum), often(lambda: y.copy_(x)))
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(8192, 8192, device="cuda").to(dtype)
        found[f"gemm_{name}_flops"] = 10 * 2 * 8192**3 / best(often(lambda a=a: a @ a))
    return {"cuda": torch.cuda.get_device_name(), **{f"cuda_{key}": value for key, value in found.items()}}
