"""What a run is asked to do. A `RunConfig` that exists is valid; every error names what to change."""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from optimizer.objectives import OBJECTIVES, Objective

FOCI = ("attention", "projections", "cache", "scheduling")
TOLERANCES = ("exact", "near", "quantised")
DTYPES = ("bfloat16", "float16", "float32")
MIN_BUDGET_S, MAX_BUDGET_S = 5.0, 7 * 24 * 3600.0
LLM = {"model": str, "base_url": str, "max_usd": float, "max_tokens": int}  # of a run; the key is the environment's
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


class ConfigError(ValueError):
    """A run was asked for that cannot be done; the text is a sentence a person reads."""


def new_run_id() -> str:
    return secrets.token_hex(8)


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m` or `1.5h`. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found:
        raise ConfigError(f"{text!r} is not a duration: write 90s, 5m or 1.5h.")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One optimisation job. `traffic` is a `TrafficProfile` as JSON; times in seconds, memory in bytes.

    `budget_s` covers the whole job: profiling, search, verification and the final measurement.
    """

    model: str  # `demo`, a folder in Hugging Face layout, or a .gguf file
    traffic: dict[str, Any]
    data_dir: str
    run_id: str = field(default_factory=new_run_id)
    name: str = ""
    dtype: str = "bfloat16"
    threads: int = 0  # 0: all cores
    objective: str = "output_throughput"  # a name of optimizer.objectives
    first_tokens: int = 16  # that the objective first_tokens is about
    budget_s: float = 300.0
    tolerance: str = "near"
    precision: str = "same"  # what a candidate may compute in; `same` is the endpoint's own dtype
    seed: int = 0
    slo: dict[str, float] = field(default_factory=dict)  # ttft_s, tpot_s
    price_per_hour: float = 0.0  # of this machine, in USD
    foci: tuple[str, ...] = ()  # empty: all
    max_kv_bytes: int = 512 << 20
    max_memory_bytes: int = 0  # that a served version may keep resident; 0: no limit
    llm: dict[str, Any] = field(default_factory=dict)  # see LLM; empty: no language model is asked

    def __post_init__(self) -> None:
        object.__setattr__(self, "foci", tuple(self.foci))
        object.__setattr__(self, "data_dir", str(self.data_dir))
        checks = (
            (bool(self.model), "A run needs a model: `demo`, a folder in Hugging Face layout, or a .gguf file."),
            (
                isinstance(self.traffic, dict) and bool(self.traffic),
                "A run needs a traffic profile: name a preset or a trace.",
            ),
            (
                bool(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.run_id)),
                f"Run id {self.run_id!r}: letters, digits, - and _ only.",
            ),
            (self.dtype in DTYPES, f"dtype {self.dtype!r} is not served: choose one of {', '.join(DTYPES)}."),
            (self.threads >= 0, f"threads is {self.threads}: give 0 for all cores, or a positive number."),
            (self.objective in OBJECTIVES, f"objective {self.objective!r} is unknown: choose {', '.join(OBJECTIVES)}."),
            (
                self.objective != "goodput" or bool(self.slo),
                "Goodput counts requests within the SLO: give limits for ttft_s or tpot_s, or choose another objective.",
            ),
            (
                self.objective != "cost" or self.price_per_hour > 0,
                "The objective cost needs price_per_hour, in USD of this machine.",
            ),
            (self.first_tokens >= 1, f"first_tokens is {self.first_tokens}: give 1 or more."),
            (self.max_memory_bytes >= 0, "max_memory_bytes cannot be negative: 0 is no limit."),
            (
                MIN_BUDGET_S <= self.budget_s <= MAX_BUDGET_S,
                f"a budget of {self.budget_s:g} s is outside {MIN_BUDGET_S:g} s to 7 days: 5m is a good start.",
            ),
            (self.tolerance in TOLERANCES, f"tolerance {self.tolerance!r}: choose one of {', '.join(TOLERANCES)}."),
            (
                set(self.foci) <= set(FOCI),
                f"foci {', '.join(self.foci)}: choose of {', '.join(FOCI)}, or none for all.",
            ),
            (self.price_per_hour >= 0, "price_per_hour cannot be negative."),
            (self.max_kv_bytes >= 1 << 20, "max_kv_bytes is under 1 MB: no block would fit; give 64 MB or more."),
            (
                set(self.slo) <= {"ttft_s", "tpot_s"} and all(v > 0 for v in self.slo.values()),
                "slo takes ttft_s and tpot_s, in seconds, both positive.",
            ),
            (
                set(self.llm) <= set(LLM),
                f"llm takes {', '.join(LLM)} and nothing else; the key comes from the environment.",
            ),
            (
                all(isinstance(v, str) if LLM[k] is str else _positive(v) for k, v in self.llm.items() if k in LLM),
                "llm: model and base_url are texts, max_usd and max_tokens positive numbers.",
            ),
        )
        for ok, message in checks:
            if not ok:
                raise ConfigError(message)

    @property
    def goal(self) -> Objective:
        return OBJECTIVES[self.objective]

    @property
    def run_dir(self) -> Path:
        return Path(self.data_dir) / "runs" / self.run_id

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"foci": list(self.foci)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunConfig:
        """Raises ConfigError for a field that does not exist or is missing: nothing is dropped silently."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"unknown field {unknown[0]!r} in a run's configuration; it has {', '.join(sorted(known))}."
            )
        missing = sorted({"model", "traffic", "data_dir"} - set(data))
        if missing:
            raise ConfigError(f"a run's configuration lacks {missing[0]!r}.")
        return cls(**data)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


@dataclass(frozen=True, slots=True)
class Budget:
    """How a run's time is shared. Verification and the final measurement are set aside before the search begins."""

    total_s: float
    search_began_s: float = 0.0  # elapsed time at which the baseline was known and the search began

    @property
    def verify_s(self) -> float:
        return min(60.0, 0.22 * self.total_s)

    @property
    def measure_s(self) -> float:
        return min(75.0, 0.26 * self.total_s)

    @property
    def search_end_s(self) -> float:
        """Elapsed time at which the search stops. A machine that takes long to profile does not take the search's time:
        a quarter of the budget is left to it, and the run ends later."""
        return max(self.total_s - self.verify_s - self.measure_s, self.search_began_s + 0.25 * self.total_s)
