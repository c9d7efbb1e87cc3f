"""Models with experts: what an expert computes for a row may not depend on who else was sent to it, but for rounding.

How many rows an expert gets is the shape of its products, and here it depends on what the neighbours say. So the exact
checks of contamination run with routers that tell no token from another (`engine.models.weights.evenly_routed`), where
step shapes say all; and this one runs with the model's own routing, near: how far a clean program's values move when
the neighbours' text changes is measured on the baseline beside it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optimizer.measure.rig import Rig, Script
from optimizer.measure.values import distance
from optimizer.records import Check
from optimizer.verify.bench import Bench
from optimizer.verify.contamination import Checker
from optimizer.verify.quality import ROUNDING

TEXTS = 8  # beside fewer, a fault that shows on one text in three is missed too often
NEAR = 0.001  # mean KL in the 16-bit types, where one rounding can send a row to another expert


def crowded(bench: Bench) -> list[Check]:
    """The last sequence's logits while those before it say other things, and so fill other experts."""
    size = bench.block_size
    scripts = [bench.script([2 * size, 2 * size, 2 * size, size + 3]) for _ in range(TEXTS)]
    ours = scripts[0]
    scripts = [
        replace(s, prompts=s.prompts[:-1] + ours.prompts[-1:], forced=s.forced[:-1] + ours.forced[-1:]) for s in scripts
    ]
    moved, own = (_moved(rig, scripts) for rig in (bench.rig, bench.base))
    limit = max(ROUNDING if bench.host.dtype == "float32" else NEAR, 4 * own)
    ok = moved <= limit
    return [
        bench.result("crowded experts", "contamination", "other text, own routing", moved, limit, "worst mean KL", ok)
    ]


def _moved(rig: Rig, scripts: list[Script]) -> float:
    """The largest distance of the last sequence's logits from those beside the first script's text."""
    first, *others = (rig.play(script)[-1] for script in scripts)
    return float(np.max([distance(first, other).mean_kl for other in others]))


CHECKS: dict[str, Checker] = {"crowded experts": crowded}
