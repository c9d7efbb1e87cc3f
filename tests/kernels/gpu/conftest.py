"""These tests run Triton kernels under its interpreter, on CPU tensors. It has to be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
WITHOUT_TRITON = "triton is not installed: pip install triton"


class Skipped(pytest.File):
    """Stands for a file whose imports need Triton."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(WITHOUT_TRITON)


def pytest_pycollect_makemodule(module_path: object, parent: pytest.Collector) -> pytest.Collector | None:
    if importlib.util.find_spec("triton") is None:
        return Skipped.from_parent(parent, path=module_path)
    return None
