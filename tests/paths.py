"""Where tests find what they read: shared reference data (skipped when absent) and the demo model."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("POLYMORPH_SHARED", ROOT.parent / "shared"))


def test_data() -> Path:
    """A data folder kept between test runs, so that the demo model is converted once."""
    return Path(os.environ.get("POLYMORPH_TEST_DATA", ROOT / "build" / "test-data"))


test_data.__test__ = False  # type: ignore[attr-defined]


def demo_model() -> Path:
    """The demo model as a Hugging Face folder, converted on first use."""
    from engine.models.resolve import resolve_model

    return resolve_model("demo", test_data())
