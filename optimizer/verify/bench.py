"""One candidate under verification: a fresh host, the baseline beside it, and content that nobody could foresee."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.artifacts import Artifact
from engine.client import HostClient
from engine.models.config import ModelConfig
from engine.wire import Loaded, Prepare, TimedBlock
from optimizer.measure.rig import Rig, Script, Tokens
from optimizer.measure.values import same_bits
from optimizer.records import Check, Verdict

FORCED = 4
TIMED_BLOCKS = 8
TIMED_S, FEW_BLOCKS = 4.0, 3  # past so many seconds fewer blocks are enough: each is long


@dataclass
class Bench:
    """`text` are token ids of running text. `layers` 0 is all of them; controls run on a few."""

    host: HostClient
    candidate: Artifact
    baseline: Artifact
    config: ModelConfig
    text: Sequence[int]
    seed: int
    layers: int = 0
    pool_blocks: int = 96
    concurrency: int = 4
    limit_s: float = 60.0  # for one answer of the host
    rigs: dict[str, Rig] = field(default_factory=dict)
    shapes: dict[str, Loaded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Before the candidate is loaded, the baseline's answers and speed are taken down as its witness."""
        self.rng = np.random.default_rng(self.seed)
        self.witness_script = self.script((40, 23))
        self.witness = self.base.play(self.witness_script)
        self.witness_s = self.baseline_seconds()

    def baseline_seconds(self) -> float:
        """The lower quartile of timed blocks of the baseline: other work on the machine only makes a block longer."""
        rig, script = self.base, self.witness_script
        steps = [rig.batch(s) for s in script.decode_steps(rig.tables(script))]
        self.host.call(Prepare("witness", steps))
        repeats, times = 1, []
        while len(times) < (TIMED_BLOCKS if sum(times) * repeats < TIMED_S else FEW_BLOCKS):
            start = time.perf_counter()
            self.host.call(TimedBlock(self.baseline.hash, "witness", self.layers, repeats))
            seconds = time.perf_counter() - start
            if seconds < 0.02 and repeats < 512:
                repeats *= 2
                continue
            times.append(seconds / repeats)
        return sorted(times)[len(times) // 4]

    @property
    def rig(self) -> Rig:
        """The candidate, loaded on first use with a pool of `pool_blocks`."""
        return self._rig(self.candidate)

    @property
    def base(self) -> Rig:
        return self._rig(self.baseline)

    def _rig(self, artifact: Artifact) -> Rig:
        if artifact.hash not in self.rigs:
            self.rigs[artifact.hash] = Rig(
                self.host, artifact, self.layers, blocks=self.pool_blocks, timeout_s=self.limit_s
            )
            self.shapes[artifact.hash] = self.rigs[artifact.hash].loaded
        return self.rigs[artifact.hash]

    @property
    def shape(self) -> Loaded:
        """Block size and bytes of the candidate's pool, without loading it again."""
        return self.shapes.get(self.candidate.hash) or self.rig.loaded

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    def passage(self, length: int) -> Tokens:
        """Running text from a place of its own."""
        start = int(self.rng.integers(0, max(1, len(self.text) - length)))
        found = tuple(self.text[start : start + length])
        return found + self.noise(length - len(found))

    def noise(self, length: int) -> Tokens:
        return tuple(int(t) for t in self.rng.integers(0, self.config.vocab_size, length))

    def script(self, lengths: Sequence[int], forced: int = FORCED, **fields: object) -> Script:
        prompts = tuple(self.passage(n) for n in lengths)
        return Script(prompts, tuple(self.noise(forced) for _ in lengths), **fields)  # type: ignore[arg-type]

    def boundary_lengths(self) -> list[int]:
        """Prompts that end one short of a block, on its edge and one past it, for one block and for two."""
        size, most = self.block_size, self.config.max_position_embeddings - FORCED
        return [min(n, most) for n in (size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1)]

    def all_blocks(self) -> range:
        return range(self.rig.loaded.blocks)

    def result(
        self,
        check: str,
        family: str,
        case: str,
        value: float | None,
        limit: float | None,
        unit: str,
        ok: bool | None,
        detail: str = "",
    ) -> Check:
        """`ok` None is inconclusive."""
        verdict = Verdict.INCONCLUSIVE if ok is None else Verdict.PASS if ok else Verdict.FAIL
        seed = f"seed {self.seed}"
        return Check(self.candidate.hash, check, family, case, value, limit, unit, verdict, None, seed, detail)

    def equal(
        self, check: str, case: str, one: Sequence[np.ndarray], two: Sequence[np.ndarray], detail: str = ""
    ) -> Check:
        """Passes only when every bit of every row is the same."""
        differ = sum(same_bits(a, b) for a, b in zip(one, two, strict=True))
        return self.result(check, "contamination", case, float(differ), 0.0, "values that differ", differ == 0, detail)
