"""Tile registers: the emulation's bits, tails of k, and that the real instructions are compiled and asked for."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import build, registry
from kernels.hardware import detect
from tests.kernels import support

SMALLEST = torch.finfo(torch.float32).smallest_normal
PROBE = """
#include <cstdint>
extern "C" void dot(int rows, int pairs, const void* x, const void* w, void* sums) {
  TileShapes shapes;
  shapes.set(0, rows, 16), shapes.set(4, rows, pairs), shapes.set(5, pairs, 16);
  tile_configure(shapes);
  tile_load<0>(sums, 64), tile_load<4>(x, pairs * 4), tile_load<5>(w, 64);
  tile_dot<0, 4, 5>();
  tile_store<0>(sums, 64);
  tile_release();
}
"""


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < SMALLEST, torch.zeros_like(x).copysign(x), x)


def documented(x: Tensor, w: Tensor, sums: Tensor) -> Tensor:
    """tdpbf16ps as Intel writes it down: x [rows, pairs, 2], w [pairs, 16, 2] bf16 on sums [rows, 16] float32."""
    x, w = flushed(x.float()).double(), flushed(w.float()).double()
    halves = torch.zeros(*sums.shape, 2)
    for q in range(x.shape[1]):  # a product of two bf16 is exact in a double: one rounding, as in a fused multiply-add
        halves = flushed((halves.double() + x[:, q, None] * w[q]).float())
    return flushed(flushed(sums) + flushed(halves[..., 0] + halves[..., 1]))


def with_hard_values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of very different sizes, denormals, zeros and infinities among them."""
    x = torch.randn(shape, generator=generator) * torch.randint(-60, 60, shape, generator=generator).float().exp2()
    rare = torch.rand(shape, generator=generator)
    for at, value in ((0.02, SMALLEST / 8), (0.04, -SMALLEST / 2), (0.06, 0.0), (0.061, float("inf"))):
        x = torch.where((rare < at) & (rare >= at - 0.02), torch.full_like(x, value), x)
    return x


def test_the_emulation_gives_the_documented_bits(tmp_path: Path) -> None:
    text = registry.inlined(registry.ROOT / "common" / "amx.hpp") + PROBE
    built = build.compile_cpp(
        support.write_source(tmp_path, text), out_dir=tmp_path, defines={"PM_AMX_EMULATE": "1"}, openmp=False
    )
    assert built.path is not None, built.log
    probe, g = ctypes.CDLL(str(built.path)), torch.Generator().manual_seed(5)
    for rows, pairs in ((1, 1), (16, 16), (3, 7), (15, 2), (2, 16), (16, 1)):
        x, w = (with_hard_values(s, g).bfloat16() for s in ((rows, pairs, 2), (pairs, 16, 2)))
        sums = with_hard_values((rows, 16), g)
        want = documented(x, w, sums)
        probe.dot(rows, pairs, *(ctypes.c_void_p(t.data_ptr()) for t in (x, w, sums)))
        same = (sums.view(torch.int32) == want.view(torch.int32)) | (sums.isnan() & want.isnan())
        assert same.all(), (rows, pairs)


def test_every_tail_of_k_and_panel_width_is_exact() -> None:
    """Whole numbers, whose sums are exact in any order; with other weights and rows lying where a tail ends."""
    for vecs in (1, 2, 3, 4):
        library, g = (
            support.library("small_m_matmul", {"PM_PANEL_VECS": vecs, "PM_ROW_TILE": 7}, PM_AMX_EMULATE=1),
            torch.Generator().manual_seed(1),
        )
        for k in range(2, 68, 2):
            x, w = (torch.randint(-9, 9, (rows, k), generator=g).bfloat16() for rows in (19, 70))
            linear = support.glue("small_m_matmul").PackedLinear(library, w, None, 2)
            assert torch.equal(linear(x, torch.float32), x.float() @ w.float().T), (vecs, k)


@pytest.fixture(scope="module")
def for_sapphire_rapids(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(assembly, library) of the linear operator as it is built on a CPU with AMX, whatever this CPU has."""
    if (compiler := build.compiler()) is None or detect().name == "" or "avx512bw" not in detect().features:
        pytest.skip("needs an x86 compiler")
    folder = tmp_path_factory.mktemp("amx")
    source = support.write_source(folder, registry.instantiate("small_m_matmul"))
    flags = ["-march=sapphirerapids" if flag == "-march=native" else flag for flag in build.command_flags((), {}, True)]
    assembly, library = folder / "source.s", folder / "source.so"
    for command in (
        [compiler, "-S", "-o", str(assembly), str(source), *flags],
        [compiler, "-o", str(library), str(assembly), *flags],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
    return assembly.read_text(), library


def test_a_cpu_with_tiles_gets_the_real_instructions(for_sapphire_rapids: tuple[str, Path]) -> None:
    assembly, path = for_sapphire_rapids
    for instruction in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert instruction in assembly
    assert ctypes.CDLL(str(path)).instruction_set() == 5


def test_tiles_that_the_system_refuses_are_reported_by_name(for_sapphire_rapids: tuple[str, Path]) -> None:
    library = ctypes.CDLL(str(for_sapphire_rapids[1]))
    if library.instruction_set_usable():
        pytest.skip("this system grants tiles")
    with pytest.raises(ValueError, match=r"refuses this process the tile registers \(AMX\)"):
        support.glue("small_m_matmul").PackedLinear(library, torch.zeros(4, 4).bfloat16(), None, 1)
    assert support.library("small_m_matmul").instruction_set_usable()
