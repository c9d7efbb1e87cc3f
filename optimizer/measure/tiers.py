"""Tier 1: a few layers, candidate and baseline in turns. Tier 2: all layers, the traffic through the scheduler.

Values are checked before anything is timed and again after it. The clock is ours; content is new in every timed pair.
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
from engine.wire import BlockDone, Prepare, TimedBlock
from optimizer.cost.roofline import DTYPE_BYTES, Workload, weight_share
from optimizer.measure.replay import Replay, Work
from optimizer.measure.rig import Rig, Script, Tokens
from optimizer.measure.stats import PairedRatio, conclude, decide, paired_ratio
from optimizer.measure.values import distance
from optimizer.records import State

MIN_BLOCK_S = 0.02  # shorter blocks are at the mercy of the pipe and the scheduler
DECODE_STEPS = 4
FLOOR_SHARE = 0.8  # of the physical floor: the ceiling is measured too
MAX_KL, MIN_AGREE = 0.02, 0.98  # a screen for wrong programs; verification judges the fine differences
SPARE = 2.5  # pool bytes over what the baseline's layout needs: a candidate's may be padded


class WrongValues(Exception):
    """A candidate's logits are not the model's."""


class TooFast(Exception):
    """A candidate beat what the machine's memory allows: it cannot have done the work."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When pairs are enough: at a look where the verdict is settled and the interval narrow, or when time is up."""

    margin: float  # what two equal programs may seem to differ by here
    looks: tuple[int, ...] = (3, 5, 8)
    limit_s: float = 5.0
    width: float = 0.05  # half the interval, on the log scale

    def enough(self, ratios: list[float], elapsed_s: float) -> bool:
        if len(ratios) < 2:
            return False
        if len(ratios) >= self.looks[-1] or elapsed_s >= self.limit_s:
            return True
        found = decide(ratios, self.margin, self.looks)
        if not found.done:
            return False
        estimate = paired_ratio(ratios)
        return found.state is State.DISCARD or math.log(estimate.ci_high / estimate.ci_low) / 2 <= self.width

    def state(self, ratios: list[float]) -> State:
        """What settled the measurement at a look, or the verdict on one that time cut short."""
        found = decide(ratios, self.margin, self.looks)
        if not found.done:
            found = conclude(ratios, self.margin)
        assert found.state is not None
        return found.state


@dataclass(frozen=True, slots=True)
class Measured:
    """`ratio` is over the baseline; `over_incumbent` when one took part. Pairs are kept in order."""

    ratio: PairedRatio
    state: State
    device_s: float
    first_step_s: float = 0.0  # loading to the end of the first step
    over_incumbent: PairedRatio | None = None
    step_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # of the candidate, tier 2 only


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


def pool_bytes(config: ModelConfig, dtype: str, tokens: int, layers: int = 0) -> int:
    size = config.kv_width * DTYPE_BYTES[dtype] * (layers or config.num_hidden_layers)
    return int(SPARE * size * (tokens + 256))


def check_values(baseline: Rig, candidate: Rig, script: Script) -> None:
    """Both run the same script; raises WrongValues when the candidate's logits are another model's."""
    expected, got = (np.concatenate(rig.play(script)) for rig in (baseline, candidate))
    d = distance(expected, got)
    if d.mean_kl > MAX_KL or d.agree < MIN_AGREE:
        raise WrongValues(
            f"wrong values: mean KL {d.mean_kl:.3g} from the baseline (at most {MAX_KL}), "
            f"top token agrees in {d.agree:.1%} of {d.margin_rows} sure rows (at least {MIN_AGREE:.0%})"
        )


@dataclass
class TierOne:
    """A few layers. `rule` says how many pairs are enough."""

    host: HostClient
    config: ModelConfig
    dtype: str
    work: Workload
    baseline: Artifact
    layers: int
    seed: int
    rule: Rule
    quiet: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.content = Content(self.config.vocab_size, self.seed)
        room = self.work.concurrency * (self.context + DECODE_STEPS) + self.work.prefill_tokens
        self.kv_bytes = pool_bytes(self.config, self.dtype, room, self.layers)
        self.reference = Rig(self.host, self.baseline, self.layers, self.kv_bytes)
        self.reference.play(self._values())  # warm, as every candidate is

    @property
    def context(self) -> int:
        return max(1, min(round(self.work.context), self.config.max_position_embeddings - DECODE_STEPS))

    def measure(self, artifact: Artifact, timeout_s: float = 60.0) -> Measured:
        """Raises HostFailure, WrongValues. The candidate is unloaded afterwards, unless the host is gone."""
        start = time.perf_counter()
        candidate = Rig(self.host, artifact, self.layers, self.kv_bytes, timeout_s=timeout_s)
        values = self._values()
        candidate.step(values.prefill_steps(candidate.tables(values))[0])
        first_step_s = time.perf_counter() - start
        check_values(self.reference, candidate, values)
        ratios, device_s = self._pairs(candidate, values)
        candidate.unload()
        return Measured(paired_ratio(ratios), self.rule.state(ratios), device_s, first_step_s)

    def _pairs(self, candidate: Rig, values: Script) -> tuple[list[float], float]:
        weights, started = self.work.weights(), time.perf_counter()
        repeats = {"prefill": 1, "decode": 1}
        rows: list[float] = []
        while not self.rule.enough(rows, time.perf_counter() - started):
            scripts = self._fresh(values)
            times = [0.0, 0.0]
            sides = (self.reference, candidate)
            for phase, script in scripts.items():
                for rig in sides:
                    self._prepare(rig, phase, script, values)
                order = (0, 1) if len(rows) % 2 == 0 else (1, 0)
                for side in order:
                    seconds, argmax = self._timed(sides[side], phase, repeats)
                    times[side] += weights[phase] * seconds / (DECODE_STEPS if phase == "decode" else 1)
                    if side == 1:
                        self._recheck(candidate, phase, script, values, argmax)
            rows.append(times[0] / times[1])
        return rows, time.perf_counter() - started

    def _timed(self, rig: Rig, phase: str, repeats: dict[str, int]) -> tuple[float, list[int]]:
        """Seconds of one pass over the prepared steps, from a block long enough for a fair clock."""
        while True:
            with self.quiet:
                start = time.perf_counter()
                done = self.host.call(
                    TimedBlock(rig.artifact.hash, self._id(rig, phase), self.layers, repeats[phase]), 30
                )
                seconds = time.perf_counter() - start
            assert isinstance(done, BlockDone)
            if seconds >= MIN_BLOCK_S or repeats[phase] >= 256:
                return seconds / repeats[phase], done.argmax
            repeats[phase] = min(256, int(repeats[phase] * max(2, 1.3 * MIN_BLOCK_S / max(seconds, 1e-4))))

    def _recheck(self, rig: Rig, phase: str, script: Script, values: Script, argmax: list[int]) -> None:
        """The timed path must give what the plain path gives for the same content."""
        again: list[int] = []
        for step in self._steps(rig, phase, script, values):
            again += rig.step(step).argmax(-1).tolist()
        if again != argmax:
            raise WrongValues(f"the timed {phase} steps chose other tokens than the same steps run untimed")

    def _prepare(self, rig: Rig, phase: str, script: Script, values: Script) -> None:
        steps = [rig.batch(s) for s in self._steps(rig, phase, script, values)]
        self.host.call(Prepare(self._id(rig, phase), steps))

    def _steps(self, rig: Rig, phase: str, script: Script, values: Script) -> list:
        """Decode goes on from the context that the value check left in the pool; prefill has blocks behind it."""
        held = rig.tables(values)
        if phase == "decode":
            return script.decode_steps(held)
        first = max(max(t) for t in held) + 1
        return script.prefill_steps(rig.tables(script, range(first, rig.loaded.blocks)))

    def _fresh(self, values: Script) -> dict[str, Script]:
        n = self.work.concurrency
        forced = tuple(self.content.tokens(DECODE_STEPS) for _ in range(n))
        return {
            "decode": Script(values.prompts, forced),
            "prefill": self.content.script(1, self.work.prefill_tokens, 0),
        }

    def _values(self) -> Script:
        n = self.work.concurrency
        return self.content.script(n, self.context, DECODE_STEPS, chunk=max(16, 512 // n))

    def _id(self, rig: Rig, phase: str) -> str:
        return f"{phase}-{'baseline' if rig is self.reference else 'candidate'}"


@dataclass
class TierTwo:
    """All layers: baseline, incumbent and challenger answer the same requests through the scheduler, in turns."""

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

    def measure(self, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        """Raises HostFailure, WrongValues, TooFast. The challenger stays resident until `keep` says what may."""
        start = time.perf_counter()
        sides = [self.baseline, *([incumbent] if incumbent and incumbent.hash != self.baseline.hash else []), artifact]
        for side in sides:
            if side.hash not in self.replays:
                self.replays[side.hash] = self._replay(side)
        self._check(artifact)
        self.trials += 1
        requests = self.requests(self.trials)
        turns = [self.replays[side.hash] for side in sides]
        for replay in turns:
            replay.restart(requests, self.work.concurrency)
        rows = self._rounds(turns)
        fastest = turns[-1].fastest_step_s
        floor_s = self.floor_s * weight_share(artifact.manifest.precision, self.dtype)
        if fastest < FLOOR_SHARE * floor_s:
            raise TooFast(f"a step took {fastest * 1e3:.2f} ms; reading the weights alone takes {floor_s * 1e3:.2f} ms")
        ratios = [row[0] / row[-1] for row in rows]
        over = paired_ratio([row[1] / row[-1] for row in rows]) if len(sides) == 3 else None
        device_s = time.perf_counter() - start
        return Measured(
            paired_ratio(ratios), self.rule.state(ratios), device_s, 0.0, over, fastest, self._metrics(turns[-1], rows)
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

    def _rounds(self, turns: list[Replay]) -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = []
        started = time.perf_counter()
        rival = 1 if len(turns) == 3 else 0  # the pair that decides is the one with the incumbent
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
        script = self.content.script(2, 48, 2)
        check_values(self._rig(self.baseline), self._rig(artifact), script)

    def _rig(self, artifact: Artifact) -> Rig:
        return Rig(self.host, artifact, resident=self.replays[artifact.hash].loaded)
