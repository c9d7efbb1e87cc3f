"""Tier 2: all layers, the traffic through the scheduler. And what both tiers share: rules, contents, failures.

Values are checked before anything is timed. The clock is ours; content is new in every trial.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.artifacts import Artifact
from engine.client import HostClient
from engine.models.config import ModelConfig
from optimizer.cost.roofline import DTYPE_BYTES, Workload, weight_share
from optimizer.measure.replay import Replay, Work
from optimizer.measure.rig import Rig, Script, Tokens
from optimizer.measure.stats import PairedRatio, Spread, chained, conclude, decide, paired_ratio
from optimizer.measure.values import Screen
from optimizer.records import State

DECODE_STEPS = 4
FLOOR_SHARE = 0.8  # of the physical floor: the ceiling is measured too
CONTENT_USES = 16  # candidates that one content is checked with; each sees it once
MAX_KL, MIN_AGREE = 0.02, 0.98  # a screen for wrong programs; verification judges the fine differences
HOPELESS = 0.8  # confidence of the interval by which a candidate is given up early
SPARE = 2.5  # pool bytes over what the baseline's layout needs: a candidate's may be padded


class WrongValues(Exception):
    """A candidate's logits are not the model's."""


class TooFast(Exception):
    """A candidate beat what the machine's memory allows: it cannot have done the work."""


class Repeats(Exception):
    """A program of other text that does what one measured before does."""

    def __init__(self, behaviour: str, same_as: str) -> None:
        super().__init__(f"does the same as {same_as[:12]}")
        self.behaviour, self.same_as = behaviour, same_as


@dataclass(frozen=True, slots=True)
class Rule:
    """When pairs are enough: at a look where the verdict is settled and the interval narrow, or when time is up.

    A candidate may be measured in several visits, whose pairs are pooled: `visits` are the numbers of pairs, looks too, at which
    each ends. The allowed error is shared by all looks, so coming back costs no honesty.
    """

    margin: float  # what two equal programs may seem to differ by here
    looks: tuple[int, ...] = (3, 5, 8)
    limit_s: float = 5.0
    width: float = 0.05  # half the interval, on the log scale
    visits: tuple[int, ...] = ()  # empty: one
    prior: Spread | None = None

    def enough(self, ratios: list[float], elapsed_s: float, before: int = 0) -> bool:
        """`before`: pairs of earlier visits."""
        if len(ratios) < max(2, before + 1):
            return False
        if len(ratios) >= self.looks[-1] or len(ratios) in self.visits or elapsed_s >= self.limit_s:
            return True
        if len(ratios) not in self.looks:
            return False
        if self.hopeless(ratios):
            return True
        found = decide(ratios, self.margin, self.looks, prior=self.prior)
        if not found.done:
            return False
        estimate = paired_ratio(ratios, prior=self.prior)
        return found.state is State.DISCARD or math.log(estimate.ci_high / estimate.ci_low) / 2 <= self.width

    def hopeless(self, ratios: list[float]) -> bool:
        """Whether it is unlikely to prove faster with more pairs. To give up early never makes a slower program a faster one."""
        return paired_ratio(ratios, HOPELESS, self.prior).ci_high < 1 + self.margin

    def state(self, ratios: list[float]) -> State:
        """What settled the measurement at a look, or the verdict on one that time cut short.

        RETEST only for what seems faster by more than the noise: more pairs may show it. What does not is discarded.
        """
        found = decide(ratios, self.margin, self.looks, prior=self.prior)
        if not found.done and len(ratios) not in self.looks:
            found = conclude(ratios, self.margin, prior=self.prior)
        state = found.state or State.RETEST
        seems_faster = paired_ratio(ratios).ratio > 1 + self.margin
        return State.DISCARD if state is State.RETEST and not seems_faster else state


@dataclass(frozen=True, slots=True)
class Measured:
    """`ratio` is the candidate's speed over that of `against` (an artefact hash), in pairs kept in order.

    Tier 2 measures against the baseline, and `over_incumbent` when one took part; `beats` is the verdict on that.
    """

    ratio: PairedRatio
    state: State
    device_s: float
    first_step_s: float = 0.0  # loading to the end of the first step
    over_incumbent: PairedRatio | None = None
    step_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # of the candidate, tier 2 only
    against: str = ""
    behaviour: str = ""  # equal for programs that do the same, tier 1 only
    beats: State | None = None
    disturbed: int = 0  # timed blocks that other work overlapped and that were taken again


@dataclass(slots=True)
class Content:
    """Token ids that were never used before, drawn from seeds that only the caller knows."""

    vocab: int
    seed: int
    drawn: int = 0

    def tokens(self, count: int) -> Tokens:
        self.drawn += 1
        rng = np.random.default_rng((self.seed, self.drawn))
        return tuple(int(t) for t in rng.integers(0, self.vocab, count))

    def script(self, sequences: int, prompt: int, forced: int, chunk: int = 0) -> Script:
        prompts = tuple(self.tokens(prompt) for _ in range(sequences))
        return Script(prompts, tuple(self.tokens(forced) for _ in range(sequences)), chunk)


@dataclass
class Screened:
    """A content and what the baseline makes of it."""

    script: Script
    screen: Screen
    seen: set[str] = field(default_factory=set)  # artefacts that were checked with it


def linked(over: PairedRatio, link: PairedRatio) -> PairedRatio:
    """The ratio `over` an incumbent as one over the baseline, through the incumbent's own (`link`)."""
    ratio, low, high = chained(over, (link.ratio, link.ci_low, link.ci_high))
    p10, p90, *ratios = (r * link.ratio for r in (over.p10, over.p90, *over.ratios))
    return PairedRatio(ratio, low, high, over.pairs, p10, p90, over.confidence, tuple(ratios))


def standing(ratio: PairedRatio, margin: float) -> State:
    """The verdict that an interval gives."""
    if ratio.ci_low > 1 + margin:
        return State.KEEP
    if ratio.ci_low > 1:
        return State.MARGINAL
    return State.DISCARD if ratio.ci_high < 1 + margin else State.RETEST


def pool_bytes(config: ModelConfig, dtype: str, tokens: int, layers: int = 0) -> int:
    size = config.kv_width * DTYPE_BYTES[dtype] * (layers or config.num_hidden_layers)
    return int(SPARE * size * (tokens + 256))


def check_values(expected: Screen, got: list[np.ndarray]) -> None:
    """`got`: each sequence's logits. Raises WrongValues when they are not the model's that `expected` is of."""
    mean_kl, agree, rows = expected.compare(np.concatenate(got))
    if mean_kl > MAX_KL or agree < MIN_AGREE:
        raise WrongValues(
            f"wrong values: mean KL {mean_kl:.3g} from the baseline (at most {MAX_KL}), "
            f"top token agrees in {agree:.1%} of {rows} sure rows (at least {MIN_AGREE:.0%})"
        )


@dataclass
class TierTwo:
    """All layers: challenger and incumbent answer the same requests through the scheduler, in turns.

    The baseline takes part while there is no incumbent, or its speed over the baseline is not known here. Where it is, a
    challenger's is the chain through the incumbent: the baseline, several times as slow, would take most of a trial.
    """

    host: HostClient
    config: ModelConfig
    dtype: str
    work: Workload
    baseline: Artifact
    requests: Callable[[int], list[Work]]  # trial number -> the search window's requests, with new text
    seed: int
    rule: Rule
    slice_tokens: int  # output tokens each side makes in a turn
    kv_bytes: int
    floor_s: float = 0.0  # of a step, by bytes over measured bandwidth
    quiet: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.trials = 0
        self.content = Content(self.config.vocab_size, self.seed + 1)
        self.replays: dict[str, Replay] = {self.baseline.hash: self._replay(self.baseline)}
        self.standing: dict[str, PairedRatio] = {}  # artefact hash -> its speed over the baseline
        self.screened: Screened | None = None

    def measure(self, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        """Raises HostFailure, WrongValues, TooFast. The challenger stays resident until `keep` says what may."""
        start = time.perf_counter()
        rival = incumbent if incumbent and incumbent.hash != self.baseline.hash else None
        known = self.standing.get(rival.hash) if rival else None
        sides = [*([] if known else [self.baseline]), *([rival] if rival else []), artifact]
        for side in sides:
            if side.hash not in self.replays:
                self.replays[side.hash] = self._replay(side)
        self._check(artifact)
        self.trials += 1
        requests = self.requests(self.trials)
        turns = [self.replays[side.hash] for side in sides]
        for replay in turns:
            replay.restart(requests, self.work.concurrency)
        rows = self._rounds(turns, rival is not None)
        fastest = turns[-1].fastest_step_s
        floor_s = self.floor_s * weight_share(artifact.manifest.precision, self.dtype)
        if fastest < FLOOR_SHARE * floor_s:
            raise TooFast(f"a step took {fastest * 1e3:.2f} ms; reading the weights alone takes {floor_s * 1e3:.2f} ms")
        over = paired_ratio([row[-2] / row[-1] for row in rows]) if rival else None
        ratio = linked(over, known) if over and known else paired_ratio([row[0] / row[-1] for row in rows])
        self.standing[artifact.hash] = ratio
        return Measured(
            ratio,
            standing(ratio, self.rule.margin) if known else self.rule.state(list(ratio.ratios)),
            time.perf_counter() - start,
            over_incumbent=over,
            step_s=fastest,
            metrics=self._metrics(turns[-1], rows),
            against=self.baseline.hash,
            beats=self.rule.state(list(over.ratios)) if over else None,
        )

    def _metrics(self, replay: Replay, rows: list[tuple[float, ...]]) -> dict[str, float]:
        """Output tokens a second over all turns, those that a user sees between prompts, the share of drafts that held."""
        made = self.slice_tokens * len(rows)
        found = {"output_tput": made / sum(row[-1] for row in rows)}
        found |= {"interactivity": replay.interactivity} if replay.interactivity else {}
        return found if replay.accepted_share is None else found | {"accepted_share": replay.accepted_share}

    def keep(self, *hashes: str) -> None:
        """Unloads every side but the baseline and `hashes`."""
        for digest in set(self.replays) - {self.baseline.hash, *hashes}:
            self.replays.pop(digest).unload()

    def _rounds(self, turns: list[Replay], challenged: bool) -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = []
        started = time.perf_counter()
        rival = -2 if challenged else 0  # the pair that decides is the one with the incumbent
        while not self.rule.enough([row[rival] / row[-1] for row in rows], time.perf_counter() - started):
            seconds = [0.0] * len(turns)
            order = range(len(turns)) if len(rows) % 2 == 0 else reversed(range(len(turns)))
            for side in order:
                with self.quiet:
                    seconds[side] = turns[side].advance(self.slice_tokens)
            rows.append(tuple(seconds))
        return rows

    def _replay(self, artifact: Artifact) -> Replay:
        return Replay(self.host, artifact, self.kv_bytes)

    def _check(self, artifact: Artifact) -> None:
        held = self.screened
        if held is None or artifact.hash in held.seen or len(held.seen) >= CONTENT_USES:
            script = self.content.script(2, 48, 2)
            held = self.screened = Screened(script, Screen(np.concatenate(self._rig(self.baseline).play(script))))
        held.seen.add(artifact.hash)
        check_values(held.screen, self._rig(artifact).play(held.script))

    def _rig(self, artifact: Artifact) -> Rig:
        return Rig(self.host, artifact, resident=self.replays[artifact.hash].loaded)
