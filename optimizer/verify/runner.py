"""All checks of one finalist, in fresh processes that never saw the benchmark, on content drawn after it came."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient, HostFailure
from engine.models.config import ModelConfig
from optimizer.cost.roofline import weight_share
from optimizer.measure.tiers import pool_bytes
from optimizer.records import Check, Verdict
from optimizer.verify import contamination, integrity, quality, serving
from optimizer.verify.bench import Bench

KEEP_KV = 256 << 20
OnChecks = Callable[[list[Check]], None]


@dataclass
class Verifier:
    """`text` are ids of running text in the model's own tokens; `floor_s` is the least a decode step can take.

    `control_caught` says, by check, whether its planted fault was caught on this machine (see controls.py).
    """

    model: Path
    config: ModelConfig
    dtype: str
    threads: int
    baseline: Artifact
    artifacts: ArtifactStore
    text: tuple[int, ...]
    log_dir: Path
    tolerance: str = "near"
    floor_s: float = 0.0
    concurrency: int = 4
    limit_s: float = 60.0  # for one answer of a host
    control_caught: dict[str, bool] = field(default_factory=dict)
    on_checks: OnChecks = lambda checks: None
    between: Callable[[], None] = lambda: None  # called between checks; may raise to stop

    def verify(self, candidate: Artifact) -> list[Check]:
        """Every check of `candidate`, failed ones included. Never raises for what the candidate does."""
        seed = secrets.randbits(48)
        done: list[Check] = []
        try:
            with self.host(self.dtype, "verifier") as host:
                bench = self._bench(host, candidate, seed)
                for name, checker in self._checkers():
                    self.between()
                    done += self._told(self._run(bench, name, checker))
                    if not host.alive:
                        break
        except HostFailure as failure:
            done += self._told([_lost(candidate.hash, "verification", "integrity", failure, seed)])
        return done

    def _checkers(self) -> Iterable[tuple[str, contamination.Checker]]:
        yield from contamination.CHECKS.items()
        yield from serving.CHECKS.items()
        yield "physical floor", lambda bench: integrity.floor(bench, self.floor_s * self._weight_share(bench))
        yield from integrity.CHECKS.items()
        yield "proof of application", lambda bench: integrity.application(bench, self.artifacts)
        yield "distance from float32", self._quality

    def _weight_share(self, bench: Bench) -> float:
        return weight_share(bench.candidate.manifest.precision, self.dtype)

    def _run(self, bench: Bench, name: str, checker: contamination.Checker) -> list[Check]:
        try:
            return checker(bench)
        except HostFailure as failure:
            family = "contamination" if name in contamination.CHECKS or name in serving.CHECKS else "integrity"
            family = "quality" if name == "distance from float32" else family
            return [_lost(bench.candidate.hash, name, family, failure, bench.seed)]

    def _quality(self, bench: Bench) -> list[Check]:
        with self.host("float32", "reference") as reference:
            return quality.judge(bench, reference, self.tolerance)

    def _bench(self, host: HostClient, candidate: Artifact, seed: int) -> Bench:
        shape = {"concurrency": self.concurrency, "limit_s": self.limit_s}
        return Bench(host, candidate, self.baseline, self.config, self.text, seed, **shape)  # type: ignore[arg-type]

    def host(self, dtype: str, name: str) -> HostClient:
        kv = pool_bytes(self.config, dtype, 2048)
        log = self.log_dir / f"{name}.log"
        return HostClient(
            self.model, dtype=dtype, threads=self.threads, kv_bytes=min(max(kv, 1 << 22), KEEP_KV), log=log
        )

    def _told(self, checks: list[Check]) -> list[Check]:
        marked = [replace(c, control_caught=self.control_caught.get(c.check)) for c in checks]
        self.on_checks(marked)
        return marked


def _lost(artifact_hash: str, check: str, family: str, failure: HostFailure, seed: int) -> Check:
    """A check that the candidate could not answer: it failed."""
    detail = f"{failure.message} {failure.log_tail.strip()[-300:]}".strip()
    return Check(artifact_hash, check, family, "runs", None, None, "", Verdict.FAIL, None, f"seed {seed}", detail)
