"""What every operator promises. A subclass names the operator, its cases and how to run them; the tests are here.

A case runs to a list of tensors. `expected` gives the float32 reference of a case, `close` how near is right.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import registry
from tests.kernels import support


class KernelContract:
    op: str
    cases: dict[str, Any]  # shapes by name
    mixed: str  # the case that parameter sets, thread counts and instruction sets are all tried on
    values: Mapping[str, int] = {}  # parameters that all tests of the class are built with

    def build(self, values: Mapping[str, int] = {}) -> ctypes.CDLL:
        return support.library(self.op, {**self.values, **values})

    def run(self, library: ctypes.CDLL, case: Any, threads: int, block_size: int = 32) -> list[Tensor]:
        raise NotImplementedError

    def expected(self, case: Any, values: Mapping[str, int] = {}) -> list[Tensor]:
        """The reference, of the operator with these parameter values where they change what is right."""
        raise NotImplementedError

    def close(self, got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)

    def check(self, got: list[Tensor], want: list[Tensor], values: Mapping[str, int] = {}) -> None:
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            self.close(a, b)

    @pytest.mark.parametrize("isa", support.instruction_sets())
    def test_it_equals_the_reference_on_every_instruction_set(self, isa: str) -> None:
        library = support.library_for(self.op, isa, self.values)
        for case in self.cases.values():
            self.check(self.run(library, case, 2), self.expected(case, self.values), self.values)

    def test_plain_rows_need_no_repacking(self) -> None:
        if "PM_LAYOUT" not in registry.load(self.op).defaults():
            pytest.skip("the operator has no weights")
        if not registry.load(self.op).allows({**self.values, "PM_LAYOUT": 0}):
            pytest.skip("these weights are always repacked")
        library = self.build({"PM_LAYOUT": 0})
        for case in self.cases.values():
            self.check(self.run(library, case, 2), self.expected(case, self.values), self.values)

    def test_threads_change_no_bit(self) -> None:
        library = self.build()
        one = self.run(library, self.cases[self.mixed], 1)
        for threads in (2, 3, 5):
            for a, b in zip(one, self.run(library, self.cases[self.mixed], threads), strict=True):
                assert torch.equal(a, b), f"{threads} threads"

    def test_every_parameter_value_gives_right_results(self) -> None:
        if self.values:
            pytest.skip("every value is tried once, by the operator's own class")
        for values in support.covering_values(self.op):
            size = 64 if values.get("PM_SPAN") == 64 else 32
            want = self.expected(self.cases[self.mixed], values)
            self.check(self.run(support.library(self.op, values), self.cases[self.mixed], 2, size), want, values)

    def test_its_source_is_self_contained_and_names_its_parameters(self) -> None:
        text = registry.instantiate(self.op)
        assert not re.search(r'#include "', text)
        for name, value in registry.load(self.op).defaults().items():
            assert f"#define {name} {value}\n" in text

    def test_its_glue_needs_only_ctypes_and_torch(self) -> None:
        imports = re.findall(r"^\s*(?:import|from) (\w+)", registry.load(self.op).glue_text, re.MULTILINE)
        assert set(imports) <= {"ctypes", "torch", "math"}
