"""A landscape that nobody measured: every part and value has its factor, so tests know what is best."""

from __future__ import annotations

import math
import random

from optimizer.agents.programs.program import Program
from tests.landscape import space
from tests.landscape.table import Landscape, Row

STEP = {"decode": 0.06, "prefill": 0.3}
SHARES = {"projections": 0.56, "head": 0.08, "attention": 0.08, "cache": 0.15, "pointwise": 0.13}
ABOUT = {
    "threads": 2,
    "noise": 0.01,
    "ceilings": {"read_gbs": 20.0},
    "spread": {"variance": 0.0009, "pairs": 11.0},
    "work": {
        "concurrency": 4,
        "isl": 200.0,
        "osl": 60.0,
        "prefill_tokens": 200,
        "step_s": STEP,
        "operators": {phase: {op: share * s for op, share in SHARES.items()} for phase, s in STEP.items()},
    },
    "floors": {phase: {op: 0.1 * share * s for op, share in SHARES.items()} for phase, s in STEP.items()},
}
FACTORS: dict[object, float] = {
    "packed_linear": 1.35,
    "small_linear": 1.5,
    "fused_qkv": 1.05,
    "rms_norm": 1.03,
    "index_select": 1.08,
    "paged_attention": 1.1,
    "rolled_rope": 1.01,
    "whole_step": 3.2,
    ("PM_WEIGHT_BITS", 12): 1.12,
    ("PM_PANEL_VECS", 2): 0.97,
    ("PM_PREFETCH", 1024): 1.01,
    ("PM_PREFETCH", 4096): 1.03,
    ("PM_DEAL", 1): 0.98,
    ("PM_SPIN", 1000): 0.99,
    ("PM_SPIN", 20000): 1.01,
    ("PM_OWN_NORM_ROWS", 0): 0.97,
}
BEST = "whole_step (PM_PREFETCH=4096, PM_SPIN=20000, PM_WEIGHT_BITS=12)"


def landscape() -> Landscape:
    rows = {name: row(name, speed) for name, speed in {"baseline": 1.0, **speeds()}.items()}
    units = {unit for program in space.programs() for unit in space.units(program)}
    return Landscape(ABOUT, "whole_step", "baseline", rows, dict.fromkeys(units, 5.0))


def speeds() -> dict[str, float]:
    return {p.name: speed_of(p) for p in space.programs()}


def speed_of(program: Program) -> float:
    return math.prod(FACTORS[choice] for choice in (*program.parts, *program.values))


def row(name: str, speed: float) -> Row:
    rng = random.Random(name)
    first, second = (tuple(speed / 3.2 * f for f in scatter(rng, n)) for n in (10, 5))
    pair_s = 0.025 * (1 + 3.2 / speed)
    return Row(name, f"of {name}", "", first, second, load_s=0.4, pair_s=pair_s, open_s=0.8, turn_s=0.55 / speed)


def scatter(rng: random.Random, count: int, width: float = 0.02) -> list[float]:
    """Factors around 1 whose logs lie evenly around 0."""
    half = [rng.gauss(0, width) for _ in range(count // 2)]
    return [math.exp(v) for log in half for v in (log, -log)] + [1.0] * (count % 2)
