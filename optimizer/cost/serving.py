"""TTFT and TPOT of a served model on a device that is not here: physical times, each as much longer as published points show.

A prediction is a sum of `Times` with coefficients that are never below one for bytes and operations (nothing beats its
roofline), times a factor of the serving framework. Coefficients were fitted on published points and are kept as data
(`serving_coefficients.json`, by `python -m optimizer.cost.serving_fit`); the points are not. Estimates say what they are:
`estimated` within what was fitted, `extrapolated` outside it, `unvalidated` where no point of the device or framework was
there to check against. The last two have wider intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimizer.cost.deployment import FRAMEWORKS, Deployment, DeploymentError, plain_roofline
from optimizer.records import Provenance

COEFFICIENTS = Path(__file__).with_name("serving_coefficients.json")
TIMES = ("dense", "experts", "context", "attention", "exchange", "exchanges", "layers", "expert_layers")
PREFILL = tuple(
    t for t in TIMES if t not in ("context", "exchanges")
)  # a prompt reads no context yet; exchanges are long
TPOT_TERMS = (*TIMES, "sequence", "step", *(f"prompt_{t}" for t in PREFILL))
TTFT_TERMS = (
    *PREFILL,
    *(f"load_{t}" for t in PREFILL),
    *(f"start_{f}" for f in FRAMEWORKS),
    "request",
    "tpot",
    "no_room",
)
SEQUENCE_S, STEP_S, START_S, REQUEST_S = (
    1e-5,
    1e-3,
    1e-2,
    1e-3,
)  # units of what one sequence, step, answer or request costs
WIDER = {
    Provenance.ESTIMATED: 1.0,
    Provenance.EXTRAPOLATED: 2.0,
    Provenance.UNVALIDATED: 2.0,
}  # of the interval, in logs


@dataclass(frozen=True, slots=True)
class Blend:
    """Coefficients of terms, and factors of frameworks (the first of `FRAMEWORKS` is 1)."""

    coefficients: tuple[float, ...]
    factors: tuple[float, ...]

    def __call__(self, terms: NDArray[np.float64], frameworks: Sequence[str]) -> NDArray[np.float64]:
        """Seconds of each row. A framework that was not fitted gets the mean factor."""
        known = dict(zip(FRAMEWORKS, self.factors, strict=True))
        usual = math.exp(sum(map(math.log, self.factors)) / len(self.factors))
        return np.asarray(terms @ np.array(self.coefficients) * np.array([known.get(f, usual) for f in frameworks]))


@dataclass(frozen=True, slots=True)
class Range:
    """What the fitted points spanned, of one feature."""

    low: float
    high: float

    def outside(self, value: float) -> bool:
        return not self.low * 0.999 <= value <= self.high * 1.001


@dataclass(frozen=True, slots=True)
class ServingEstimate:
    """Seconds, with an interval that held four of five held-out points. `reasons` say why it is no better than it is."""

    ttft_s: float
    ttft_low: float
    ttft_high: float
    tpot_s: float
    tpot_low: float
    tpot_high: float
    roofline_ttft_s: float
    roofline_tpot_s: float
    provenance: Provenance
    reasons: tuple[str, ...] = ()

    @property
    def interactivity(self) -> float:
        """Output tokens a second of one user."""
        return 1 / self.tpot_s


def tpot_terms(d: Deployment) -> tuple[float, ...]:
    """A decode step, and the prompts that are prefilled for each."""
    prompts, prefill = d.prompts_a_step(), d.prefill()
    own = (*d.decode().values(), d.running / d.ranks * SEQUENCE_S, STEP_S)
    return (*own, *(prompts * getattr(prefill, t) for t in PREFILL))


def ttft_terms(d: Deployment, tpot_s: float) -> tuple[float, ...]:
    """A prompt, those before it, the framework's start, and waiting for a step or for room."""
    prompt, load = d.prefill(), d.waiting_prompts()
    prefill = [getattr(prompt, t) for t in PREFILL]
    starts = (START_S * (d.framework == f) for f in FRAMEWORKS)
    rest = (d.concurrency * REQUEST_S, tpot_s, d.turned_away() * d.osl * tpot_s)
    return (*prefill, *(load * t for t in prefill), *starts, *rest)


def features(d: Deployment) -> dict[str, float]:
    """What an estimate may not leave the fitted range of."""
    return {
        "tokens in": float(d.isl),
        "tokens out": float(d.osl),
        "requests a rank": d.concurrency / d.ranks,
        "devices": float(d.devices),
        "weights on a device (GB)": d.weight_bytes / 1e9,
        "active parameters (1e9)": d.model.active_numbers / 1e9,
        "requests over room": d.concurrency / d.room,
    }


@dataclass(frozen=True, slots=True)
class ServingModel:
    """Both blends, and what they were fitted and checked on. Spreads are (10th, 90th) percentiles of log measured/predicted."""

    tpot: Blend
    ttft: Blend
    ranges: Mapping[str, Range]
    formats: Mapping[str, Sequence[str]]  # device -> weight formats of its points
    frameworks: Sequence[str]
    spreads: Mapping[str, Mapping[str, tuple[float, float]]]  # device -> tpot, ttft

    def times(self, deployments: Sequence[Deployment]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(TTFT, TPOT) of each, never below the roofline, without a look at what they are worth."""
        frameworks = [d.framework for d in deployments]
        least_ttft, least_tpot = np.array([plain_roofline(d) for d in deployments]).T
        tpot = np.maximum(self.tpot(np.array([tpot_terms(d) for d in deployments]), frameworks), least_tpot)
        terms = np.array([ttft_terms(d, s) for d, s in zip(deployments, tpot, strict=True)])
        return np.maximum(self.ttft(terms, frameworks), least_ttft), tpot

    def estimate(self, d: Deployment) -> ServingEstimate:
        """Raises DeploymentError when the weights do not fit."""
        if not d.fits:
            needs, has = d.weight_bytes / 1e9, d.device.memory / 1e9
            raise DeploymentError(
                f"{d.model.name} needs {needs:.0f} GB for weights on each {d.device.name}, which has {has:.0f}: "
                "use more devices or fewer bits."
            )
        provenance, reasons = self.worth(d)
        (ttft,), (tpot,) = self.times([d])
        low, high = self._interval("ttft", d, provenance), self._interval("tpot", d, provenance)
        roofline_ttft, roofline_tpot = plain_roofline(d)
        return ServingEstimate(
            float(ttft), float(ttft) * low[0], float(ttft) * low[1], float(tpot), float(tpot) * high[0],
            float(tpot) * high[1], roofline_ttft, roofline_tpot, provenance, reasons,
        )  # fmt: skip

    def worth(self, d: Deployment) -> tuple[Provenance, tuple[str, ...]]:
        """What an estimate of this deployment may call itself, and why."""
        unchecked = []
        if d.device.name not in self.formats:
            unchecked.append(f"no published point of {d.device.name} was there to check against")
        if d.framework not in self.frameworks:
            unchecked.append(f"no published point of {d.framework} was there to check against")
        beyond = []
        if d.device.name in self.formats and d.weights not in self.formats[d.device.name]:
            beyond.append(f"{d.weights} weights were not measured on {d.device.name}")
        for name, value in features(d).items():
            if (r := self.ranges[name]).outside(value):
                beyond.append(f"{name}: {value:.4g} is outside {r.low:.4g} to {r.high:.4g}")
        if unchecked:
            return Provenance.UNVALIDATED, (*unchecked, *beyond)
        return (Provenance.EXTRAPOLATED, tuple(beyond)) if beyond else (Provenance.ESTIMATED, ())

    def _interval(self, what: str, d: Deployment, provenance: Provenance) -> tuple[float, float]:
        """Factors of the estimate. A device without points of its own has what the others have on average, then widened."""
        own = self.spreads.get(d.device.name)
        spreads = [s[what] for s in ([own] if own else self.spreads.values())]
        low, high = (float(np.mean(ends)) for ends in zip(*spreads, strict=True))
        return math.exp(min(low, 0.0) * WIDER[provenance]), math.exp(max(high, 0.0) * WIDER[provenance])


@cache
def fitted_model() -> ServingModel:
    """The model whose coefficients are kept with the product."""
    return from_json(json.loads(COEFFICIENTS.read_text())["model"])


def from_json(kept: Mapping[str, object]) -> ServingModel:
    data: dict = dict(kept)
    if (tuple(data["tpot_terms"]), tuple(data["ttft_terms"])) != (TPOT_TERMS, TTFT_TERMS):
        raise ValueError(
            "the kept coefficients are of other terms: fit again with `python -m optimizer.cost.serving_fit`"
        )
    return ServingModel(
        tpot=Blend(tuple(data["tpot"]["coefficients"]), tuple(data["tpot"]["factors"])),
        ttft=Blend(tuple(data["ttft"]["coefficients"]), tuple(data["ttft"]["factors"])),
        ranges={name: Range(*pair) for name, pair in data["ranges"].items()},
        formats=data["formats"],
        frameworks=data["frameworks"],
        spreads={device: {w: (s[0], s[1]) for w, s in own.items()} for device, own in data["spreads"].items()},
    )
