"""What a load measurement yields: one sample a request, and a summary in InferenceX's field names. In seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from optimizer.measure.stats import percentile
from optimizer.records import clean


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request as a client saw it. `ttft_s` and `e2el_s` count from `intended_s`; `sent_s`: really sent."""

    index: int
    intended_s: float
    sent_s: float
    ttft_s: float
    itl_s: tuple[float, ...]
    e2el_s: float
    isl: int
    osl: int
    status: int  # HTTP; 0: no answer
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    version: str = ""  # what the server says answered

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each token after the first; None for an answer of one."""
        return (self.e2el_s - self.ttft_s) / (self.osl - 1) if self.osl > 1 else None

    def brief(self) -> dict[str, Any]:
        """The sample as the report keeps it."""
        names = ("intended_s", "sent_s", "ttft_s", "e2el_s", "isl", "osl", "cached_tokens", "status", "error")
        return clean({k: getattr(self, k) for k in names} | {"tpot_s": self.tpot_s})

    def to_json(self) -> dict[str, Any]:
        return clean(asdict(self) | {"tpot_s": self.tpot_s})


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits for goodput; a request meets them when it succeeded and each limit given holds."""

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")

    def met(self, sample: RequestSample) -> bool:
        return sample.ok and sample.ttft_s <= self.ttft_s and (sample.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Samples in the order sent. `duration_s`: first intended send to last end, summed when results were joined."""

    requests: tuple[RequestSample, ...]
    duration_s: float
    concurrency: int  # of a closed loop; 0: open loop

    @property
    def done(self) -> list[RequestSample]:
        return [r for r in self.requests if r.ok]

    @property
    def failed(self) -> list[RequestSample]:
        return [r for r in self.requests if not r.ok]

    @property
    def output_tput(self) -> float:
        """Output tokens a second of requests that succeeded."""
        return sum(r.osl for r in self.done) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def input_tput(self) -> float:
        return sum(r.isl for r in self.done) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def total_tput(self) -> float:
        return self.output_tput + self.input_tput

    def goodput(self, slo: Slo) -> float:
        """Requests a second that met the limits."""
        return sum(slo.met(r) for r in self.requests) / self.duration_s if self.duration_s > 0 else 0.0

    def percentiles(self, name: str) -> dict[str, float | None]:
        """mean, median, std, p90, p95, p99 of `ttft`, `tpot`, `itl`, `e2el` (seconds) or `intvty` (tokens/s/user)."""
        values = self._values(name)
        figures = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
        out = {k: percentile(values, level) for k, level in figures.items()}
        some = len(values) > 0
        out |= {"mean": float(np.mean(values)) if some else np.nan, "std": float(np.std(values)) if some else np.nan}
        return clean(out)

    def summary(self, slo: Slo | None = None, devices: int = 1) -> dict[str, Any]:
        """InferenceX's names: throughput a device and latency figures; lengths are means over finished requests."""
        done = self.done
        out: dict[str, Any] = {
            "isl": round(float(np.mean([r.isl for r in done])), 1) if done else None,
            "osl": round(float(np.mean([r.osl for r in done])), 1) if done else None,
            "conc": self.concurrency or None,
            "requests": len(self.requests),
            "failed": len(self.failed),
            "duration_s": self.duration_s,
            "request_tput": len(done) / self.duration_s if self.duration_s > 0 else 0.0,
            "output_tput": self.output_tput,
            "input_tput": self.input_tput,
            "total_tput": self.total_tput,
            "tput_per_gpu": self.total_tput / devices,
            "output_tput_per_gpu": self.output_tput / devices,
            "input_tput_per_gpu": self.input_tput / devices,
            "cached_tokens": sum(r.cached_tokens for r in done),
        }
        for name in ("ttft", "tpot", "itl", "e2el", "intvty"):
            out |= {f"{figure}_{name}": value for figure, value in self.percentiles(name).items()}
        if slo:
            out |= {"goodput": self.goodput(slo)}
        return clean(out)

    def _values(self, name: str) -> list[float]:
        if name == "itl":
            return [gap for r in self.done for gap in r.itl_s]
        if name in ("tpot", "intvty"):
            tpots = [r.tpot_s for r in self.done if r.tpot_s]
            return tpots if name == "tpot" else [1 / t for t in tpots]
        return [getattr(r, f"{name}_s") for r in self.done]


def join(results: Iterable[LoadResult]) -> LoadResult:
    """Several windows as one: samples together, durations added. Raises ValueError for none."""
    parts: Sequence[LoadResult] = list(results)
    if not parts:
        raise ValueError("there is no window to join")
    requests = tuple(r for part in parts for r in part.requests)
    return LoadResult(requests, sum(p.duration_s for p in parts), parts[0].concurrency)
