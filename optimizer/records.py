"""The nouns of a search. Frozen, torch-free, and stored as JSON by every `RunStore`. Times in seconds.

An agent makes a `Proposal`; the builder makes a `Candidate` of it; the cost model an `Estimate`; tiers 1 and 2 an
`Experiment`; verification a list of `Check`. A wrong result cannot be built: see `Experiment.__post_init__`.
"""

from __future__ import annotations

import enum
import time
from dataclasses import asdict, dataclass, field
from typing import Any


class State(enum.StrEnum):
    """What became of a candidate. The first four are verdicts from a measured noise floor."""

    KEEP = "keep"
    MARGINAL = "marginal"
    RETEST = "retest"
    DISCARD = "discard"
    PREDICTED = "predicted"  # pruned by the cost model, never measured
    FAILED = "failed"  # did not compile, crashed, hung, wrong values
    DUPLICATE = "duplicate"  # other text that does what an earlier candidate does: shares its result, not counted


class Verdict(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not_applicable"


class Provenance(enum.StrEnum):
    """What stands behind a figure, best first. A badge beside every estimate."""

    MEASURED = "measured"
    FITTED = "fitted"  # on measurements of this machine
    ROOFLINE = "roofline"  # from measured ceilings alone
    ESTIMATED = "estimated"  # from specifications, checked against published points
    EXTRAPOLATED = "extrapolated"  # outside what was fitted
    UNVALIDATED = "unvalidated"  # nothing was there to check against


MEASURED = frozenset({State.KEEP, State.MARGINAL, State.RETEST, State.DISCARD})
# surely faster than the other side; the end-to-end measurement judges by how much
FASTER = (State.KEEP, State.MARGINAL)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A program an agent wants tried. `files` maps a file name (`forward.py`, `decode.cpp`) to its text."""

    id: str
    agent: str
    focus: str  # attention | projections | cache | scheduling
    name: str
    hypothesis: str
    mechanism: str  # python | cpp | compile | triton | settings
    files: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    precision: str = "bfloat16"
    batch_invariant: bool = False
    parent: str = ""  # artifact hash it was derived from
    expected: float = 0.0  # speed over the baseline that its agent expects; 0: not said
    device: str = "cpu"  # or cuda
    because: str = ""  # id of the post on the board that led to it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal that was built: named by content. `source_hash` strips constants, so it names the mechanism."""

    artifact_hash: str
    source_hash: str
    proposal_id: str
    name: str
    agent: str
    focus: str
    mechanism: str
    hypothesis: str
    parent: str
    path: str
    build_s: float = 0.0
    build_log: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted speed-up over the baseline on the endpoint's traffic."""

    artifact_hash: str
    ratio: float
    low: float
    high: float
    provenance: str  # a Provenance
    detail: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A *measured* candidate at one tier. `ratio` is its speed over the baseline's.

    It was timed in turns with `against`: the baseline, or at tier 1 the incumbent once there is one. `paired` is the speed over
    that, which the state is the verdict on; `ratio` is then the chain of both ratios, with the combined interval.
    Raises ValueError for a ratio without passed checks, or for a measured state without a ratio and its interval.
    """

    id: str
    artifact_hash: str
    tier: int  # 1 few layers, 2 all layers through the scheduler, 3 end to end over HTTP
    state: State
    against: str  # artifact hash of the other side of the pair
    checks_passed: bool
    ratio: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    samples: list[float] = field(default_factory=list)  # paired ratios over `against`, in the order measured
    predicted: float | None = None
    provenance: str = ""  # of `predicted`
    # tier 2: output_tput (tok/s), interactivity (tok/s/user), accepted_share (of drafts)
    metrics: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    hot_swap_s: float | None = None  # source text to first measured step
    failure: str = ""
    log_tail: str = ""
    paired: float | None = None  # speed over `against`
    paired_low: float | None = None
    paired_high: float | None = None
    visit: int = 1  # a candidate that could not be told from the incumbent is measured again, at most twice
    behaviour: str = ""  # equal for programs that do the same and are scheduled alike
    leads: bool = False  # tier 2: it became the incumbent
    same_as: str = ""  # of a duplicate: the artifact hash of the earlier one

    def __post_init__(self) -> None:
        if self.ratio is not None and not self.checks_passed:
            raise ValueError("an experiment whose checks did not pass has no ratio")
        if self.state in MEASURED and None in (self.ratio, self.ci_low, self.ci_high):
            raise ValueError(f"state {self.state} needs a ratio and its interval")
        if self.state is State.DUPLICATE and not self.same_as:
            raise ValueError("a duplicate says what it is one of")
        if self.state is State.FAILED and not self.failure:
            raise ValueError("a failed experiment says why")


@dataclass(frozen=True, slots=True)
class Check:
    """One verification check of one candidate. `control_caught`: the planted fault was caught by this very check."""

    artifact_hash: str
    check: str
    family: str  # contamination | quality | integrity
    case: str
    value: float | None
    limit: float | None
    unit: str
    verdict: Verdict
    control_caught: bool | None = None
    seed_ref: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Post:
    """A message on the board."""

    id: str
    agent: str
    kind: str  # claim | result | insight | dead_end | question | answer
    text: str
    artifact_hash: str = ""
    reply_to: str = ""
    expires: float = 0.0  # unix time; 0 never
    at: float = field(default_factory=time.time)
    data: dict[str, Any] = field(default_factory=dict)


def to_json(record: Any) -> dict[str, Any]:
    """A JSON-ready dict of a record; enums as their values, NaN and infinity as None."""
    return clean(asdict(record))


def clean(value: Any) -> Any:
    """`value` with NaN and infinity replaced by None at any depth: JSON has neither."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return str(value) if isinstance(value, enum.Enum) else value
