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
from optimizer.verify import contamination, experts, integrity, quality, serving
from optimizer.verify.bench import Bench

KEEP_KV = 256 << 20
OnChecks = Callable[[list[Check]], None]
Checkers = Iterable[tuple[str, contamination.Checker]]
CONTAMINATION = contamination.CHECKS | serving.CHECKS | experts.CHECKS


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
            for even, checkers in self._rounds():
                with self.host(self.dtype, "verifier", even) as host:
                    bench = self._bench(host, candidate, seed)
                    for name, checker in checkers:
                        self.between()
                        done += self._told(self._run(bench, name, checker))
                        if not host.alive:
                            return done
        except HostFailure as failure:
            done += self._told([_lost(candidate.hash, "verification", "integrity", failure, seed)])
        return done

    def _rounds(self) -> Iterable[tuple[bool, Checkers]]:
        """Checkers that share a host, and whether its experts are chosen evenly. Without experts one host serves all."""
        exact = [*contamination.CHECKS.items(), *serving.CHECKS.items()]
        if self.config.experts is None:
            return [(False, [*exact, *self._other_checkers()])]
        return [(True, exact), (False, [*experts.CHECKS.items(), *self._other_checkers()])]

    def _other_checkers(self) -> Checkers:
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
            family = "contamination" if name in CONTAMINATION else "integrity"
            family = "quality" if name == "distance from float32" else family
            return [_lost(bench.candidate.hash, name, family, failure, bench.seed)]

    def _quality(self, bench: Bench) -> list[Check]:
        with self.host("float32", "reference") as reference:
            return quality.judge(bench, reference, self.tolerance)

    def _bench(self, host: HostClient, candidate: Artifact, seed: int) -> Bench:
        shape = {"concurrency": self.concurrency, "limit_s": self.limit_s}
        return Bench(host, candidate, self.baseline, self.config, self.text, seed, **shape)  # type: ignore[arg-type]

    def host(self, dtype: str, name: str, even_routing: bool = False) -> HostClient:
        kv = min(max(pool_bytes(self.config, dtype, 2048), 1 << 22), KEEP_KV)
        log = self.log_dir / f"{name}.log"
        return HostClient(
            self.model, dtype=dtype, threads=self.threads, kv_bytes=kv, log=log, even_routing=even_routing
        )

    def _told(self, checks: list[Check]) -> list[Check]:
        marked = [replace(c, control_caught=self.control_caught.get(c.check)) for c in checks]
        self.on_checks(marked)
        return marked


def _lost(artifact_hash: str, check: str, family: str, failure: HostFailure, seed: int) -> Check:
    """A check that the candidate could not answer: it failed."""
    detail = f"{failure.message} {failure.log_tail.strip()[-300:]}".strip()
    return Check(artifact_hash, check, family, "runs", None, None, "", Verdict.FAIL, None, f"seed {seed}", detail)
