"""These tests run Triton kernels under its interpreter, on CPU tensors. It has to be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
