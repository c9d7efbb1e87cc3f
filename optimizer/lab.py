"""The search host and what is resident in it: both tiers, opened again when a candidate takes the host down."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient, HostFailure
from engine.models.config import ModelConfig, read_config
from engine.models.resolve import resolve_model
from engine.models.tokenizer import Tokenizer
from engine.sequence import SamplingParams
from engine.wire import HostStatus, Prepare, Status, TimedBlock, Unload
from kernels.build import compiler, compiler_version, has_compiler
from kernels.ceilings import CeilingsError, cached_ceilings
from kernels.hardware import detect
from optimizer.agents.base import Machine
from optimizer.builder import Builder
from optimizer.config import RunConfig
from optimizer.cost.fitted import CostModel
from optimizer.cost.roofline import Ceilings, Workload, floors, lowest_allowed, step_bytes
from optimizer.ledger import Ledger
from optimizer.measure.probe import operator_seconds, probe_artifact, shares
from optimizer.measure.replay import Work
from optimizer.measure.rig import Rig
from optimizer.measure.stats import Spread, noise_floor
from optimizer.measure.tier_one import TierOne
from optimizer.measure.tiers import (
    DECODE_STEPS,
    Content,
    Measured,
    Repeats,
    Rule,
    TierTwo,
    TooFast,
    WrongValues,
    pool_bytes,
)
from optimizer.records import Proposal
from optimizer.traffic.profile import TrafficProfile
from optimizer.traffic.prompts import prompt_ids, source_ids

FEW_LAYERS = 4
SLICE_STEPS = 10  # decode steps of one turn in tier 2
MEMORY_SHARE = 0.5  # of the host's limit, from where it is started afresh between candidates
OPEN_LOOP_CONCURRENCY = 4
NULL_PAIRS = 12  # of the baseline with its twin
MOST_NOISE = 0.05  # a gain of more is worth finding however noisy the machine: its interval says how sure it is
LOOKS, VISITS = (
    (2, 4, 10, 20),
    (4, 10, 20),
)  # pairs of tier 1: what seems faster after 4 and is not sure comes back twice


@dataclass(frozen=True, slots=True)
class Scene:
    """What the run is about: model, machine, traffic. Fixed for the whole run."""

    model: Path
    config: ModelConfig
    profile: TrafficProfile  # that the final figure is measured on
    searched: TrafficProfile  # that candidates are compared on
    text: tuple[int, ...]
    ceilings: dict[str, Any]
    machine: Machine
    threads: int

    @classmethod
    def of(cls, config: RunConfig) -> Scene:
        """Raises ModelError, TrafficError: sentences for a person."""
        data_dir = Path(config.data_dir)
        model = resolve_model(config.model, data_dir)
        model_config = read_config(model)
        given = TrafficProfile.from_json(config.traffic).clipped(model_config.max_position_embeddings)
        profile = config.goal.traffic(given, config.first_tokens)
        searched = config.goal.searched(given, config.first_tokens)
        hardware = detect()
        threads = config.threads or hardware.cores
        try:
            ceilings = cached_ceilings(data_dir, threads)
        except CeilingsError as error:
            ceilings = {"missing": str(error)}
        machine = Machine(threads, tuple(hardware.features), ceilings, has_compiler(), hardware.gpu)
        text = source_ids(Tokenizer(model).encode)
        return cls(model, model_config, profile, searched, text, ceilings, machine, threads)

    def mean_lengths(self) -> tuple[float, float]:
        shapes = self.searched.sample(512, seed=1, window="search", max_context=self.config.max_position_embeddings)
        return sum(s.isl for s in shapes) / len(shapes), sum(s.osl for s in shapes) / len(shapes)

    def requests(self, count: int, seed: int) -> list[Work]:
        """Requests of the search window, with new text for every seed."""
        shapes = self.searched.sample(count, seed, "search", self.config.max_position_embeddings)
        return [
            Work(
                tuple(prompt_ids(s, f"{seed}:{i}", self.text, f"search {seed}")),
                max(1, min(s.osl, self._room(s.isl))),
                SamplingParams(**s.sampling(), ignore_eos=True),
            )
            for i, s in enumerate(shapes)
        ]

    def _room(self, isl: int) -> int:
        return self.config.max_position_embeddings - isl - 1

    def environment(self) -> dict[str, Any]:
        path = compiler()
        return {
            "cpu": detect().name,
            "cores": detect().cores,
            "features": list(self.machine.features),
            "gpu": str(self.machine.gpu) if self.machine.gpu else None,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "compiler": compiler_version(path) if path else None,
            "kernel": platform.release(),
            "threads": self.threads,
            "ceilings": self.ceilings,
        }


@dataclass
class Lab:
    """Opens the host, profiles the baseline, measures candidates. Use `open` first, `close` last."""

    run: RunConfig
    scene: Scene
    ledger: Ledger
    artifacts: ArtifactStore
    noise: float = 0.01
    operators: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: dict[str, dict[str, float]] = field(default_factory=dict)  # artefact hash -> phase -> seconds of all layers
    restarts: int = 0
    spread: Spread = field(default_factory=Spread)  # of pairs at tier 1, over all candidates

    def __post_init__(self) -> None:
        self.baseline = self.artifacts.baseline(self.scene.config)
        self.log = self.run.run_dir / "search-host.log"
        self.host = HostClient(
            self.scene.model,
            dtype=self.run.dtype,
            threads=self.scene.threads,
            kv_bytes=min(self.run.max_kv_bytes, 256 << 20),
            log=self.log,
        )

    def open(self) -> None:
        """Starts the host and profiles the baseline: operators, step times, what two equal programs differ by."""
        self.host.start()
        self.work = self._profile()
        self.cost = CostModel(self.work, self._floors(), self._ceilings().measured)
        self._open_tiers()
        self.noise = self._null_noise()
        self._rules()

    def close(self) -> None:
        self.host.close()

    def tier_one(
        self,
        artifact: Artifact,
        incumbent: Artifact | None,
        timeout_s: float,
        earlier: Sequence[float] = (),
        judge: Callable[[str], None] = lambda behaviour: None,
    ) -> Measured:
        """See `TierOne.measure`. What `judge` raises passes through; the candidate is let go of then."""
        return self._guarded(artifact, lambda: self.one.measure(artifact, timeout_s, incumbent, earlier, judge))

    def tier_two(self, artifact: Artifact, incumbent: Artifact | None) -> Measured:
        return self._guarded(artifact, lambda: self.two.measure(artifact, incumbent))

    def keep(self, *hashes: str) -> None:
        """Lets go of what is resident at all layers, but for the baseline and `hashes`; a bloated host starts afresh."""
        self.two.keep(*hashes)
        status = self.host.call(Status())
        assert isinstance(status, HostStatus)
        if status.rss_bytes > MEMORY_SHARE * self.host.memory_limit:
            self._reopen("host restarted: memory")

    def measure_swaps(self, builder: Builder, worked: Mapping[str, Proposal]) -> None:
        """Source text to the end of the first step of all layers, for each kind of candidate that worked here."""
        for mechanism, proposal in worked.items():
            self.ledger.check()
            if mechanism == "compile":
                continue
            variants = [proposal]
            if mechanism == "cpp":  # the same kernel as text that no build has seen
                unseen = f"\n// {secrets.token_hex(8)}\n"
                files = {n: t + unseen if n.endswith(".cpp") else t for n, t in proposal.files.items()}
                variants.append(replace(proposal, files=files))
            for variant in variants:
                with contextlib.suppress(HostFailure):
                    self.ledger.swap(*self._swap(builder, variant))
                if not self.host.alive:
                    self._reopen("host restarted: a candidate took it down")

    def _swap(self, builder: Builder, proposal: Proposal) -> tuple[str, float]:
        script = Content(self.scene.config.vocab_size, self.run.seed + 53).script(1, 16, 1)
        start = time.perf_counter()
        built = builder.build(proposal)
        rig = Rig(self.host, built.artifact, kv_bytes=pool_bytes(self.scene.config, self.run.dtype, 256))
        rig.step(script.prefill_steps(rig.tables(script))[0])
        seconds = time.perf_counter() - start
        rig.unload()
        return built.kind, seconds

    def shares(self) -> dict[str, dict[str, float]]:
        return shares(self.operators)

    @property
    def floor_s(self) -> float:
        """The least a decode step of all layers can take, or 0 when the memory's rate was not measured."""
        ceilings = self._ceilings()
        return step_bytes(self.scene.config, self.run.dtype) / ceilings.read if ceilings.measured else 0.0

    def _guarded(self, artifact: Artifact, measure: Callable[[], Measured]) -> Measured:
        """A failure costs the candidate, and a restart when it took the host down; nothing else."""
        try:
            return measure()
        except Repeats:
            self.host.call(Unload(artifact.hash, self.one.layers))
            raise
        except (HostFailure, WrongValues, TooFast):
            if self.host.alive:
                self.host.call(Unload(artifact.hash, self.one.layers))
                self.host.call(Unload(artifact.hash))
                self._open_tiers()
            else:
                self._reopen("host restarted: a candidate took it down")
            raise

    def _reopen(self, why: str) -> None:
        with self.ledger.losing(why):
            self.restarts += 1
            self.host.restart()
            self._open_tiers()

    def _open_tiers(self) -> None:
        model, run, work = self.scene.config, self.run, self.work
        layers = min(FEW_LAYERS, model.num_hidden_layers)
        self.one = TierOne(
            self.host, model, run.dtype, work, self.baseline, layers, self._seed(101),
            Rule(self.noise), self.ledger.quiet,
        )  # fmt: skip
        longest = max(
            s.isl + s.osl for s in self.scene.searched.sample(256, 2, "search", model.max_position_embeddings)
        )
        kv = pool_bytes(model, run.dtype, work.concurrency * longest)
        self.two = TierTwo(
            self.host, model, run.dtype, work, self.baseline, self._requests, run.seed + 7,
            Rule(self.noise), SLICE_STEPS * work.concurrency, min(kv, run.max_kv_bytes), self.floor_s, self.ledger.quiet,
        )  # fmt: skip
        self._rules()

    def _seed(self, purpose: int) -> int:
        """Another one after each restart and in each attempt at the run: no content comes twice."""
        return self.run.seed + purpose + 1000 * self.restarts + 1_000_000 * self.ledger.lease.attempt

    def _rules(self) -> None:
        short = self.run.budget_s < 120
        self.one.rule = Rule(self.noise, LOOKS, 1.5 if short else 4.0, width=0.15, visits=VISITS, prior=self.spread)
        self.two.rule = Rule(self.noise, limit_s=3.0 if short else 9.0, width=0.05)

    def _requests(self, trial: int) -> list[Work]:
        """More than a trial can use up: what comes again would find its own prefix in the cache."""
        tokens = SLICE_STEPS * self.work.concurrency * (self.two.rule.looks[-1] + 2)
        count = 2 * self.work.concurrency + round(2 * tokens / max(self.work.osl, 1.0))
        return self.scene.requests(count, self._seed(1000 + trial))

    def time_steps(self, *hashes: str) -> None:
        """Seconds of a prefill and a decode step of all layers, for each of these artefacts, as the baseline's were taken."""
        for digest in hashes:
            try:
                self.steps[digest] = self._step_seconds(self.artifacts.get(digest))
            except HostFailure as failure:
                self.ledger.log(f"A finalist's steps could not be timed: {failure.message}", "warning")
                if not self.host.alive:
                    self._reopen("host restarted: a candidate took it down")

    def _profile(self) -> Workload:
        """The baseline on this traffic: seconds of a prefill and a decode step by our clock, and where they go."""
        isl, osl = self.scene.mean_lengths()
        concurrency = self.scene.searched.concurrency or OPEN_LOOP_CONCURRENCY
        most = self.scene.config.max_position_embeddings
        work = Workload(concurrency, isl, osl, prefill_tokens=max(1, min(round(isl), 512, most - 1)))
        context = max(1, min(round(work.context), most - DECODE_STEPS))
        content = Content(self.scene.config.vocab_size, self.run.seed + 31)
        decode = content.script(concurrency, context, DECODE_STEPS, chunk=max(16, 512 // concurrency))
        prefill = content.script(1, work.prefill_tokens, 0)
        kv = pool_bytes(self.scene.config, self.run.dtype, concurrency * (context + DECODE_STEPS) + work.prefill_tokens)
        self._timed = (decode, prefill, kv)
        self.steps[self.baseline.hash] = step_s = self._step_seconds(self.baseline)
        try:
            probe = probe_artifact(self.artifacts, self.baseline)
            found = operator_seconds(self.host, probe, decode, prefill, kv)
        except HostFailure as failure:
            self.ledger.log(f"The baseline's operators could not be timed: {failure.message}", "warning")
            found = {}
            if not self.host.alive:
                self.host.restart()
        # the probe's clocks cost time themselves: its shares are kept, our clock gives the sum
        self.operators = {
            phase: {op: share * step_s[phase] for op, share in parts.items()} for phase, parts in shares(found).items()
        }
        return Workload(concurrency, isl, osl, work.prefill_tokens, step_s, self.operators)

    def _step_seconds(self, artifact: Artifact) -> dict[str, float]:
        decode, prefill, kv = self._timed
        rig = Rig(self.host, artifact, kv_bytes=kv)
        rig.play(decode)
        found = {}
        for phase, script in (("decode", decode), ("prefill", prefill)):
            tables = rig.tables(script)
            steps = script.decode_steps(tables) if phase == "decode" else script.prefill_steps(tables)
            self.host.call(Prepare("profile", [rig.batch(s) for s in steps]))
            times = []
            for _ in range(4):
                with self.ledger.quiet:
                    start = time.perf_counter()
                    self.host.call(TimedBlock(artifact.hash, "profile"))
                    times.append((time.perf_counter() - start) / len(steps))
            found[phase] = sorted(times[1:])[1]
        rig.unload()
        return found

    def _null_noise(self) -> float:
        """The baseline against its own twin: what a pair of equal programs shows here."""
        twin = self.artifacts.put(
            self.baseline.files(), name="baseline, again", settings=dict(self.baseline.manifest.settings)
        )
        self.one.rule = Rule(0.0, looks=(NULL_PAIRS,), limit_s=4.0)
        ratios = self.one.measure(twin).ratio.ratios
        self.spread.learn(ratios)
        return min(MOST_NOISE, noise_floor(ratios).margin)

    def _ceilings(self) -> Ceilings:
        return Ceilings.of(self.scene.ceilings, self.run.dtype)

    def _floors(self) -> dict[str, dict[str, float]]:
        lowest = lowest_allowed(self.run.dtype, self.run.tolerance)
        return floors(self.scene.config, self.run.dtype, self._ceilings(), self.work, lowest)
