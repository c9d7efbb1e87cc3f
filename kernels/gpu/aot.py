"""Compiles recorded launches ahead of time, for GPUs that are not here, and reads what each kernel takes.

    python -m kernels.gpu.aot --capability 90 100 --out kernels.json

Triton's compiler and the assembler in its wheel need no GPU. A kernel that spills registers to memory is refused. Run without
TRITON_INTERPRET: an interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu.launch import Launch, interpreted

CAPABILITIES = (90, 100)
WARP = 32
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


class KernelSpills(Exception):
    """A compiled kernel keeps registers in memory: its tile is too large for its warps."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one compiled kernel takes: registers a thread, bytes of shared memory a program, bytes spilled a thread."""

    kernel: str
    capability: int
    variant: str
    registers: int
    shared: int
    spills: int
    warps: int
    seconds: float


def compile_launch(launch: Launch, capability: int) -> Record:
    """Compiles for compute capability `capability` (90: sm_90). Raises KernelSpills, or what the compiler says."""
    return refuse_spills(measure(launch, capability))


def measure(launch: Launch, capability: int) -> Record:
    """Compiles and records, spilling or not."""
    if interpreted():
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET to compile")
    start = time.perf_counter()
    signature, constants, attributes = specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, GPUTarget("cuda", capability, WARP), launch.options)
    registers, spills = resources(made.asm["cubin"])
    return Record(
        launch.kernel.__name__, capability, variant(launch), registers, made.metadata.shared, spills,
        made.metadata.num_warps, time.perf_counter() - start,
    )  # fmt: skip


def refuse_spills(record: Record) -> Record:
    """Raises KernelSpills for a kernel that spills."""
    if record.spills:
        raise KernelSpills(
            f"{record.kernel} on sm_{record.capability} spills {record.spills} bytes a thread at {record.registers} "
            f"registers ({record.variant}): take smaller blocks or more warps"
        )
    return record


def specialise(launch: Launch) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """(types by name, constants, attributes by argument), as Triton itself specialises a call: ones and None are constants."""
    named = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.constants
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        value = named[name]
        if name in launch.constants or value is None or (type(value) is int and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
            continue
        signature[name] = type_name(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def type_name(value: Any) -> str:
    """Triton's name of an argument's type. Raises TypeError for one that no kernel takes."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no kernel takes a {type(value).__name__}")


def variant(launch: Launch) -> str:
    """The dtypes, constants and options that tell one compiled kernel from another of the same name."""
    dtypes = sorted({type_name(a)[1:] for a in launch.args if isinstance(a, Tensor) and a.is_floating_point()})
    given = {**launch.constants, **launch.options}
    return " ".join([*dtypes, *(f"{name}={value}" for name, value in given.items())])


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack a thread) of a cubin with one kernel. A Triton kernel's stack holds nothing but spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump named no registers: {said}")
    return int(found[1]), int(found[2])


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of each compiled kernel that `launches` need."""
    unique: dict[str, Launch] = {}
    for launch in launches:
        unique.setdefault(f"{launch.kernel.__name__} {specialise(launch)} {launch.options}", launch)
    return list(unique.values())


def main() -> None:
    from kernels.gpu.examples import launches

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument("--quick", action="store_true", help="each kernel at fewer shapes")
    options = parser.parse_args()
    wanted = [x for x in distinct(launches(options.quick)) if options.only in x.kernel.__name__]
    records = [show(measure(x, capability)) for capability in options.capability for x in wanted]
    if options.out:
        rows = ",\n".join(" " + json.dumps({k: v for k, v in asdict(r).items() if k != "seconds"}) for r in records)
        options.out.write_text(f"[\n{rows}\n]\n")
    for record in records:
        refuse_spills(record)


def show(r: Record) -> Record:
    print(
        f"sm_{r.capability} {r.kernel:24} {r.registers:4} registers {r.shared:7} B shared "
        f"{r.spills:3} B spilled {r.warps} warps {r.seconds:5.1f} s  {r.variant}",
        flush=True,
    )
    return r


if __name__ == "__main__":
    main()
