"""The device under the process, and datasheet figures of devices that are not here. Torch-free."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATASHEET = Path(__file__).with_name("hardware.json")
CUDA_DRIVER = "libcuda.so.1"
CUDA_MULTIPROCESSORS, CUDA_MAJOR, CUDA_MINOR = 16, 75, 76  # attributes of the driver's interface


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device. `memory` in bytes."""

    name: str
    capability: tuple[int, int]  # compute capability
    memory: int = 0
    multiprocessors: int = 0

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True, slots=True)
class Hardware:
    """`cores` are those this process may use, `memory` is bytes of RAM, `cache_bytes` the last-level cache (0: unknown)."""

    name: str
    cores: int
    features: tuple[str, ...]  # CPU flags as the system names them
    memory: int
    cache_bytes: int = 0
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class Datasheet:
    """A maker's figures of one device, used only where nothing could be measured, and shown with their source.

    Rates are of dense products. `gemm_fp4_flops` is None where four-bit numbers are not multiplied as they are.
    """

    name: str
    kind: str  # cpu | gpu | accelerator
    read_gbs: float
    gemm_bf16_flops: float
    gemm_f32_flops: float
    gemm_fp8_flops: float
    gemm_fp4_flops: float | None
    link_gbs: float  # to the other devices of its node or rack, both directions together
    memory: float  # bytes
    source: str
    provenance: str = "datasheet"


@cache
def detect() -> Hardware:
    fields = cpu_fields()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return Hardware(name, usable_cores(), tuple(sorted(flags)), total_memory(), last_level_cache(), cuda_gpu())


def cuda_gpu() -> Gpu | None:
    """The first CUDA device that this process may use, as the driver tells; None without driver or device."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return None
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    capability = attribute(CUDA_MAJOR), attribute(CUDA_MINOR)
    return Gpu(name.value.decode(), capability, memory.value, attribute(CUDA_MULTIPROCESSORS))


def cpu_fields() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    fields: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        key, colon, value = line.partition(":")
        if not colon and fields:
            break
        if colon:
            fields[key.strip()] = value.strip()
    return fields


def usable_cores() -> int:
    """Cores of the affinity mask, within a cgroup's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def total_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core, 0 where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        digits, unit = text.rstrip("KMG"), text[-1:]
        if digits.isdigit():
            largest = max(largest, int(digits) * units.get(unit, 1))
    return largest


def datasheets() -> dict[str, Datasheet]:
    """Declared devices by name."""
    return {row["name"]: Datasheet(**row) for row in json.loads(DATASHEET.read_text())}
