"""Tier 1: a few layers, candidate and incumbent in turns, stopped as soon as the answer is clear.

What the candidate does is recorded before anything is timed, its values are checked against the baseline's on content that it
has not seen, every pair is timed on new content, and a pair drawn afterwards must come out the same when it is run untimed.
The clock is ours; expected outputs never leave this process.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from engine.artifacts import Artifact
from engine.client import HostClient
from engine.models.config import ModelConfig
from engine.wire import BlockDone, Prepare, TimedBlock, Trace, Traced
from optimizer.cost.roofline import Workload
from optimizer.measure.calm import Calm
from optimizer.measure.rig import Rig, Script
from optimizer.measure.stats import paired_ratio
from optimizer.measure.tiers import (
    CONTENT_USES,
    DECODE_STEPS,
    Content,
    Measured,
    Rule,
    Screened,
    WrongValues,
    check_values,
    pool_bytes,
)
from optimizer.measure.values import Screen

MIN_BLOCK_S = 0.015  # the pipe and the caller's clock take about a hundredth of it, of both sides alike
SHORT_BLOCK_S = 0.008  # of a phase that takes less than SMALL_SHARE of the time: its error weighs as little
SMALL_SHARE = 0.25
ROOM = 1.15  # over a block's least length, since one that comes out shorter is taken again
TOO_LONG = 2  # times a block's least length, from where a slow side is given fewer repeats than the other
MOST_REPEATS = 256  # of the prepared steps in a block
MIN_SHARED = 0.1  # of a timed pair's tokens must be the incumbent's too: work that was left out shares none


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
    quiet: AbstractContextManager = field(default_factory=threading.Lock)  # held while something is timed

    def __post_init__(self) -> None:
        self.content = Content(self.config.vocab_size, self.seed)
        room = self.work.concurrency * (self.context + DECODE_STEPS) + self.work.prefill_tokens
        self.kv_bytes = pool_bytes(self.config, self.dtype, room, self.layers)
        self.reference = self.rival = Rig(self.host, self.baseline, self.layers, self.kv_bytes)
        self.expected = self._renew()
        self.repeats: dict[str, int] = {}  # by side and phase, as `_id` names them
        self.calm = Calm(self.host)
        # one content for the whole run and every attempt at it: behaviours recorded with it can be compared
        same = Content(self.config.vocab_size, 1)
        self.traced = [
            same.script(self.work.concurrency, 16, 1),
            same.script(1, self.work.prefill_tokens, 0),
        ]

    @property
    def context(self) -> int:
        return max(1, min(round(self.work.context), self.config.max_position_embeddings - DECODE_STEPS))

    def measure(
        self,
        artifact: Artifact,
        timeout_s: float = 60.0,
        incumbent: Artifact | None = None,
        earlier: Sequence[float] = (),
        judge: Callable[[str], None] = lambda behaviour: None,
    ) -> Measured:
        """`earlier`: ratios over this incumbent of earlier visits, pooled with the new ones. `judge` is told the behaviour
        before anything is checked or timed; what it raises ends the measurement.

        Raises HostFailure, WrongValues. The candidate is unloaded afterwards, unless the host is gone.
        """
        self._face(incumbent or self.baseline)
        if artifact.hash in self.expected.seen or len(self.expected.seen) >= CONTENT_USES:
            self.expected = self._renew()
        start = time.perf_counter()
        candidate = Rig(self.host, artifact, self.layers, self.kv_bytes, timeout_s=timeout_s)
        warm = self.traced[0]
        candidate.choose(warm.prefill_steps(candidate.tables(warm))[0])
        first_step_s = time.perf_counter() - start
        behaviour = self._behaviour(candidate)
        judge(behaviour)
        self.expected.seen.add(artifact.hash)
        check_values(self.expected.screen, candidate.play(self.expected.script))
        begun, repeated = time.perf_counter(), self.calm.repeated
        rows = self._pairs(candidate, list(earlier))
        device_s = time.perf_counter() - begun
        candidate.unload()
        return Measured(
            paired_ratio(rows, prior=self.rule.prior),
            self.rule.state(rows),
            device_s,
            first_step_s,
            against=self.rival.artifact.hash,
            behaviour=behaviour,
            disturbed=self.calm.repeated - repeated,
        )

    def _face(self, incumbent: Artifact) -> None:
        """The incumbent stands ready with the current content in its pool."""
        if self.rival.artifact.hash == incumbent.hash:
            return
        if self.rival is not self.reference:
            self.rival.unload()
        own = incumbent.hash == self.baseline.hash
        self.rival = self.reference if own else Rig(self.host, incumbent, self.layers, self.kv_bytes)
        self.rival.play(self.expected.script)
        self.repeats.clear()

    def _renew(self) -> Screened:
        n = self.work.concurrency
        script = self.content.script(n, self.context, DECODE_STEPS, chunk=max(16, 512 // n))
        screen = Screen(np.concatenate(self.reference.play(script)))
        if self.rival is not self.reference:
            self.rival.play(script)
        return Screened(script, screen)

    def _behaviour(self, candidate: Rig) -> str:
        """Of the program in steps of the kinds that are timed; what cannot be recorded is like nothing else."""
        if candidate.artifact.manifest.mechanism == "compile":
            return candidate.artifact.hash
        steps = [candidate.batch(s) for script in self.traced for s in script.steps(candidate.tables(script))]
        found = self.host.call(Trace(candidate.artifact.hash, steps, self.layers), candidate.timeout_s)
        assert isinstance(found, Traced)
        return found.behaviour or candidate.artifact.hash

    def _pairs(self, candidate: Rig, rows: list[float]) -> list[float]:
        """`rows` and the ratios of new pairs, in the order measured."""
        weights, started, before = self.work.weights(), time.perf_counter(), len(rows)
        for phase in weights:  # until its own speed is known
            self.repeats[self._id(candidate, phase)] = self.repeats.get(self._id(self.rival, phase), 1)
        timed: list[dict[str, tuple[Script, list[int]]]] = []
        while not self.rule.enough(rows, time.perf_counter() - started, before):
            times, pair = [0.0, 0.0], {}
            sides = (self.rival, candidate)
            for phase, script in self._fresh().items():
                for rig in sides:
                    self._prepare(rig, phase, script)
                chosen: dict[int, list[int]] = {}
                for side in (0, 1) if len(rows) % 2 == 0 else (1, 0):
                    seconds, chosen[side] = self._timed(sides[side], phase)
                    times[side] += weights[phase] * seconds / (DECODE_STEPS if phase == "decode" else 1)
                pair[phase] = script, chosen[1]
                _shared(chosen[0], chosen[1], phase)
            timed.append(pair)
            rows.append(times[0] / times[1])
        for phase, (script, argmax) in timed[secrets.randbelow(len(timed))].items():
            self._recheck(candidate, phase, script, argmax)
        if self.rule.prior is not None:
            self.rule.prior.learn(rows[before:])
        return rows

    def _timed(self, rig: Rig, phase: str) -> tuple[float, list[int]]:
        """Seconds of one pass over the prepared steps, from a block long enough for a fair clock."""
        wanted = SHORT_BLOCK_S if self._share(phase) < SMALL_SHARE else MIN_BLOCK_S
        name = self._id(rig, phase)
        while True:
            repeats = self.repeats.get(name, 1)
            block = TimedBlock(rig.artifact.hash, name, self.layers, repeats)
            with self.quiet:
                seconds, done = self.calm.timed(lambda block=block: self.host.call(block, 30))
            assert isinstance(done, BlockDone)
            if not wanted <= seconds <= TOO_LONG * wanted:  # else as many as the other side: blocks alike compare best
                self.repeats[name] = min(MOST_REPEATS, math.ceil(ROOM * wanted * repeats / max(seconds, 1e-4)))
            if seconds >= wanted or repeats >= MOST_REPEATS:
                return seconds / repeats, done.argmax

    def _share(self, phase: str) -> float:
        prefill = self.work.prefill_share if self.work.step_s else 1.0
        return prefill if phase == "prefill" else 1 - prefill if self.work.step_s else 1.0

    def _recheck(self, rig: Rig, phase: str, script: Script, argmax: list[int]) -> None:
        """The timed path must give what the plain path gives for the same content."""
        again: list[int] = []
        for step in self._steps(rig, phase, script):
            again += rig.choose(step)
        if again != argmax:
            raise WrongValues(f"the timed {phase} steps chose other tokens than the same steps run untimed")

    def _prepare(self, rig: Rig, phase: str, script: Script) -> None:
        steps = [rig.batch(s) for s in self._steps(rig, phase, script)]
        self.host.call(Prepare(self._id(rig, phase), steps))

    def _steps(self, rig: Rig, phase: str, script: Script) -> list:
        """Decode goes on from the context that the value check left in the pool; prefill has blocks behind it."""
        held = rig.tables(self.expected.script)
        if phase == "decode":
            return script.decode_steps(held)
        first = max(max(t) for t in held) + 1
        return script.prefill_steps(rig.tables(script, range(first, rig.loaded.blocks)))

    def _fresh(self) -> dict[str, Script]:
        forced = tuple(self.content.tokens(DECODE_STEPS) for _ in range(self.work.concurrency))
        return {
            "decode": Script(self.expected.script.prompts, forced),
            "prefill": self.content.script(1, self.work.prefill_tokens, 0),
        }

    def _id(self, rig: Rig, phase: str) -> str:
        return f"{phase}-{'incumbent' if rig is self.rival else 'candidate'}"


def _shared(rival: list[int], candidate: list[int], phase: str) -> None:
    """On new content both choose mostly the same tokens; raises WrongValues for one that hardly ever does."""
    same = sum(a == b for a, b in zip(rival, candidate, strict=False))
    if len(rival) >= 8 and same < MIN_SHARED * len(rival):
        raise WrongValues(f"of {len(rival)} tokens chosen in timed {phase} steps {same} were the incumbent's")
