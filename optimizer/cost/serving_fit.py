"""Fits the serving model on published points, and checks it on models that it was not fitted on.

    python -m optimizer.cost.serving_fit POINTS.csv     writes serving_coefficients.json beside this file

The fit is of log times, robust (most of its error beyond a fifth counts by its root), with each coefficient drawn a little to
where it starts and kept within bounds: at least 1 for bytes and operations, so that nothing beats its roofline, and at most
what would be a machine used badly. All devices share their coefficients: their specifications are what tells them apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.cost.deployment import FRAMEWORKS, plain_roofline
from optimizer.cost.points import Point, read_points
from optimizer.cost.positive_fit import Floats, Prior, fit_positive
from optimizer.cost.serving import (
    COEFFICIENTS,
    TPOT_TERMS,
    TTFT_TERMS,
    Blend,
    Range,
    ServingModel,
    features,
    tpot_terms,
    ttft_terms,
)

Bounds = tuple[float, float, float]  # least, start, most
FREE = 400.0
PULL, FACTOR_PULL = 0.12, 0.6  # of a coefficient's log towards its start, of a framework's towards 1
SPREAD = (10, 90)  # percentiles
ROOFED = {
    "dense": 2.0,
    "experts": 3.0,
    "attention": 2.0,
    "exchange": 3.0,
}  # of a long prompt: at most so many times its peak


def tpot_bounds() -> list[Bounds]:
    bounds: list[Bounds] = []
    for term in TPOT_TERMS:
        bytes_or_operations = term.removeprefix("prompt_") in (*ROOFED, "context") and term != "attention"
        bounds.append((1.0, 1.5, FREE) if bytes_or_operations else (1e-5, 1.5 if term == "attention" else 5.0, FREE))
    return bounds


def ttft_bounds() -> list[Bounds]:
    starts = {"start_sglang": 8.0, "start_trtllm": 5.0, "start_vllm": 3.0, "request": 0.5, "tpot": 1.0, "no_room": 0.5}
    bounds: list[Bounds] = []
    for term in TTFT_TERMS:
        name = term.removeprefix("load_")
        if term in ROOFED:
            bounds.append((1.0, 1.5, ROOFED[term]))
        elif term != name:
            bounds.append((1e-5, 0.1 if name in ROOFED else 0.5, FREE))
        else:
            bounds.append((1e-4, starts.get(term, 5.0), FREE))
    return bounds


def fit_blend(
    terms: Floats, frameworks: Sequence[str], measured: Floats, votes: Floats, bounds: Sequence[Bounds]
) -> Blend:
    """Coefficients and framework factors that come closest to `measured` in logs. terms [points, terms], the rest [points]."""
    least, start, most = (np.array(column) for column in zip(*bounds, strict=True))
    member = np.array([[f == name for name in FRAMEWORKS[1:]] for f in frameworks], dtype=float)
    coefficients, factors = fit_positive(terms, measured, Prior(start, least, most, PULL), votes, member, FACTOR_PULL)
    return Blend(tuple(coefficients.tolist()), (1.0, *factors.tolist()))


def fit(points: Sequence[Point]) -> ServingModel:
    """A model of these points; its spreads are empty until `with_spreads`."""
    deployments = [p.deployment for p in points]
    frameworks, votes = [d.framework for d in deployments], np.array([p.weight for p in points])
    terms = np.array([tpot_terms(d) for d in deployments])
    tpot = fit_blend(terms, frameworks, np.array([p.tpot_s for p in points]), votes, tpot_bounds())
    steps = tpot(terms, frameworks)
    terms = np.array([ttft_terms(d, s) for d, s in zip(deployments, steps, strict=True)])
    ttft = fit_blend(terms, frameworks, np.array([p.ttft_s for p in points]), votes, ttft_bounds())
    seen = [features(d) for d in deployments]
    formats: dict[str, set[str]] = {}
    for d in deployments:
        formats.setdefault(d.device.name, set()).add(d.weights)
    return ServingModel(
        tpot=tpot,
        ttft=ttft,
        ranges={name: Range(min(s[name] for s in seen), max(s[name] for s in seen)) for name in seen[0]},
        formats={name: sorted(found) for name, found in sorted(formats.items())},
        frameworks=sorted(set(frameworks)),
        spreads={},
    )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Every point predicted by a model that saw no point of its architecture, on any device. Seconds, [points]."""

    points: Sequence[Point]
    ttft: Floats
    tpot: Floats

    def errors(self, what: str, device: str = "", model: str = "") -> Floats:
        """Relative errors of `ttft` or `tpot`, of a device's or an architecture's points."""
        measured = self.measured(what)
        return (np.abs(getattr(self, what) - measured) / measured)[self.of(device, model)]

    def plain_errors(self, what: str, device: str = "", model: str = "") -> Floats:
        """The same of the plain roofline."""
        plain = np.array([plain_roofline(p.deployment)[what == "tpot"] for p in self.points])
        measured = self.measured(what)
        return (np.abs(plain - measured) / measured)[self.of(device, model)]

    def measured(self, what: str) -> Floats:
        return np.array([getattr(p, f"{what}_s") for p in self.points])

    def of(self, device: str = "", model: str = "") -> NDArray[np.bool_]:
        names = [(p.deployment.device.name, p.deployment.model.name) for p in self.points]
        return np.array([(not device or d == device) and (not model or m == model) for d, m in names])

    def spreads(self) -> dict[str, dict[str, tuple[float, float]]]:
        result: dict[str, dict[str, tuple[float, float]]] = {}
        for device in devices(self.points):
            rows = self.of(device)
            result[device] = {}
            for what in ("tpot", "ttft"):
                low, high = np.percentile(np.log(self.measured(what) / getattr(self, what))[rows], SPREAD)
                result[device][what] = (float(low), float(high))
        return result


def devices(points: Iterable[Point]) -> list[str]:
    return sorted({p.deployment.device.name for p in points})


def models(points: Iterable[Point]) -> list[str]:
    return sorted({p.deployment.model.name for p in points})


def hold_out(points: Sequence[Point]) -> HeldOut:
    """One fit for each architecture, without it."""
    ttft, tpot = np.zeros(len(points)), np.zeros(len(points))
    for name in models(points):
        own = np.array([p.deployment.model.name == name for p in points])
        model = fit([p for p, mine in zip(points, own, strict=True) if not mine])
        ttft[own], tpot[own] = model.times([p.deployment for p, mine in zip(points, own, strict=True) if mine])
    return HeldOut(points, ttft, tpot)


def to_json(model: ServingModel, held_out: HeldOut, source: Path) -> dict[str, Any]:
    """What is kept: the fitted model, how well it did on held-out models, and where it comes from."""
    points = held_out.points
    kept = asdict(model) | {"spreads": held_out.spreads(), "tpot_terms": TPOT_TERMS, "ttft_terms": TTFT_TERMS}
    kept["ranges"] = {name: (r.low, r.high) for name, r in model.ranges.items()}
    return {
        "provenance": {
            "points": len(points),
            "distinct": len({(p.deployment.device.name, p.ttft_s, p.tpot_s) for p in points}),
            "by_device": {d: int(held_out.of(d).sum()) for d in devices(points)},
            "models": models(points),
            "file": source.name,
            "command": f"python -m optimizer.cost.serving_fit {source.name}",
            "date": datetime.date.today().isoformat(),
            "attribution": "Aggregated serving points measured by the ai-dynamo/aiconfigurator project "
            "(systems/silicon_sample.csv) and SemiAnalysis InferenceX. Only fitted coefficients are kept here.",
            "licence": "Apache-2.0",
        },
        "held_out": summary(held_out),
        "model": rounded(kept),
    }


def summary(held_out: HeldOut) -> dict[str, dict[str, float]]:
    """device -> median relative errors on held-out models, and the plain roofline's beside them."""
    result = {}
    for device in devices(held_out.points):
        row = {"points": float(held_out.of(device).sum())}
        for what in ("ttft", "tpot"):
            row[what] = float(np.median(held_out.errors(what, device)))
            row[f"{what}_roofline"] = float(np.median(held_out.plain_errors(what, device)))
        result[device] = row
    return rounded(result)


def rounded(value: Any) -> Any:
    """Numbers to five significant digits."""
    if isinstance(value, float):
        return 0.0 if value == 0 else round(value, 4 - math.floor(math.log10(abs(value))))
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fits the serving model on published points.")
    parser.add_argument("points", type=Path, help="CSV of aiconfigurator's silicon samples")
    parser.add_argument("--out", type=Path, default=COEFFICIENTS)
    given = parser.parse_args(arguments)
    points = read_points(given.points)
    kept = to_json(fit(points), hold_out(points), given.points)
    given.out.write_text(json.dumps(kept, indent=1) + "\n")
    for device, row in kept["held_out"].items():
        print(
            f"{device:<18}{row['points']:>6.0f} points   TTFT {row['ttft']:.1%} (roofline {row['ttft_roofline']:.1%})"
            f"   TPOT {row['tpot']:.1%} (roofline {row['tpot_roofline']:.1%})"
        )


if __name__ == "__main__":
    main()
