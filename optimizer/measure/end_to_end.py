"""The figure that is shown: baseline and winner over HTTP on held-out traffic, interleaved A B, B A, A B ..., paired.

Both servers stay up; the idle one uses no processor time. A pair is two windows, one on each side, of the same
request shapes with content of their own, drawn with the same seeds; every answer has the length asked for, so a pair is
equal work and its throughputs can be divided. The held-out windows have the profile's own lengths. Stable traffic (every
request of the median shape), the burst (twice as many prompts at once) and the other concurrencies use the median shape,
scaled down alike to fit the time left; the result says by how much. Nothing is dropped: a window with a failed or short
answer ends the measurement with the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.models.config import read_config
from engine.models.tokenizer import Tokenizer
from optimizer.measure.load import LoadRequest, Target, run_closed_loop
from optimizer.measure.samples import LoadResult, Slo, join
from optimizer.measure.servers import CpuWatch, MeasureFailed, Server, ServerSpec, api_server
from optimizer.measure.stats import PairedRatio, interleaving, mean_interval, paired_ratio
from optimizer.objectives import OBJECTIVES, Objective
from optimizer.traffic.profile import RequestShape, TrafficProfile
from optimizer.traffic.prompts import prompt_ids, source_ids

SIDES = {"a": "baseline", "b": "winner"}
HELDOUT_SHARE = 0.55  # of the time left once both servers are warm
MIN_PAIRS, MAX_PAIRS = 3, 16  # of held-out windows
SIDE_PAIRS = 3  # of every other scenario
SHORTEST = 16  # tokens: side scenarios are not scaled below this


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. `budget_s` covers it all, from starting the servers on."""

    baseline: Path  # artefact folders
    winner: Path
    profile: TrafficProfile
    server: ServerSpec
    log_dir: Path
    budget_s: float = 70.0
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    objective: Objective = OBJECTIVES["output_throughput"]
    sweep: tuple[int, ...] = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Paired windows of one kind of traffic. `windows` are in the order run: pair, side, and what each side did."""

    name: str
    what: str
    concurrency: int
    ratio: PairedRatio
    windows: dict[str, tuple[LoadResult, ...]]  # baseline, winner

    def joined(self, side: str) -> LoadResult:
        return join(self.windows[side])

    def point(self, side: str) -> dict[str, Any]:
        """This concurrency's place in a throughput-interactivity chart, with the interval over windows."""
        tput, low, high = mean_interval([w.output_tput for w in self.windows[side]])
        whole = self.joined(side)
        speeds, waits = whole.percentiles("intvty"), whole.percentiles("ttft")
        figures = {"output_tput": tput, "ci_low": low, "ci_high": high, "total_tput": whole.total_tput}
        return figures | {"interactivity": speeds["median"], "median_ttft": waits["median"], "p95_ttft": waits["p95"]}


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """`scenarios`: heldout, stable, burst. `sweep`: one scenario for every concurrency, of one request shape."""

    scenarios: tuple[Scenario, ...]
    sweep: tuple[Scenario, ...]
    cold_start_s: dict[str, float]
    memory_bytes: dict[str, int | None]  # most that each side's processes kept resident
    foreign_cores: float | None
    notes: tuple[str, ...]
    seconds: float

    @property
    def heldout(self) -> Scenario:
        return self.scenarios[0]


Progress = Callable[[str, int, int, float], None]  # scenario, pair, of, ratio


def measure_end_to_end(job: Job, on_pair: Progress = lambda *_: None) -> EndToEnd:
    """Raises MeasureFailed when a server does not start or answers wrongly. What `on_pair` raises ends it as well."""
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = {
            side: stack.enter_context(api_server(job.server, folder, side, job.log_dir))
            for side, folder in (("baseline", job.baseline), ("winner", job.winner))
        }
        bench = _Bench(job, servers, on_pair)
        bench.warm_up()
        watch = CpuWatch(list(servers.values()))
        left = job.budget_s - (time.monotonic() - begin)
        heldout = bench.heldout(time.monotonic() + HELDOUT_SHARE * left)
        scenarios, sweep, notes = bench.sides(heldout, begin + job.budget_s)
        foreign = watch.foreign_cores()
        cold = {side: s.cold_start_s for side, s in servers.items()}
        memory = {side: s.peak_bytes() for side, s in servers.items()}
    if foreign is not None and foreign > 0.1:
        notes.append(f"other programs kept {foreign:.2f} cores busy on average while this was measured")
    return EndToEnd((heldout, *scenarios), sweep, cold, memory, foreign, tuple(notes), time.monotonic() - begin)


class _Bench:
    """Two warm servers and the means to run one pair of windows on them."""

    def __init__(self, job: Job, servers: dict[str, Server], on_pair: Progress) -> None:
        self.job, self.servers, self.on_pair = job, servers, on_pair
        self.source = source_ids(Tokenizer(job.server.model).encode)
        self.context = read_config(job.server.model).max_position_embeddings
        self.targets = {side: Target(s.url, job.server.name) for side, s in servers.items()}

    def warm_up(self) -> None:
        """Short requests of a scope of their own, so that no prompt measured later finds its prefix cached."""
        conc = self.job.profile.concurrency
        shapes = [RequestShape(0, s.isl, min(s.osl, 8), **s.sampling()) for s in self._sample(self.job.profile, conc)]
        for side in self.servers:
            self._window(side, shapes, conc, "warmup")

    def heldout(self, deadline: float) -> Scenario:
        """Windows of as many requests as there are users, until the deadline, MIN_PAIRS at least."""
        profile = self.job.profile
        conc = profile.concurrency
        shapes = self._sample(profile, conc * MAX_PAIRS)
        slices = [shapes[i * conc : (i + 1) * conc] for i in range(MAX_PAIRS)]
        what = f"{conc} users; lengths and prefixes of the held-out window of the traffic"
        return self._scenario("heldout", what, conc, slices, deadline)

    def sides(self, heldout: Scenario, deadline: float) -> tuple[list[Scenario], tuple[Scenario, ...], list[str]]:
        """Stable traffic, the burst and the other concurrencies, in the time left."""
        profile = self.job.profile
        conc = profile.concurrency
        levels = {"stable": conc, "burst": profile.burst().concurrency}
        levels |= {f"concurrency {c}": c for c in self.job.sweep if c not in levels.values()}
        (median, *_) = self._sample(profile.stable(), 1)
        scale = self._fitting(heldout, median, list(levels.values()), deadline - time.monotonic())
        isl, osl = (max(SHORTEST, round(n * scale)) for n in (median.isl, median.osl))
        notes = []
        if scale < 1:
            shape_text = f"{isl} tokens in, {osl} out instead of {median.isl} and {median.osl}"
            notes.append(f"stable, burst and concurrency figures are of shorter requests to fit the time: {shape_text}")
        done = {}
        for name, users in levels.items():
            what = f"{users} users, every request {isl} tokens in and {osl} out"
            what = f"twice as many prompts at once: {what}" if name == "burst" else what
            done[name] = self._scenario(name, what, users, self._alike(users, isl, osl), None)
        sweep = sorted((s for s in done.values() if s.concurrency in self.job.sweep), key=lambda s: s.concurrency)
        return [done["stable"], done["burst"]], tuple(sweep), notes

    def _fitting(self, heldout: Scenario, shape: RequestShape, users: list[int], seconds: float) -> float:
        """The share of the median shape with which all side scenarios fit; a token costs what it cost held out.

        With fewer users a token costs more, at most in proportion; with more users at most the same.
        """
        per_token = sum(w.duration_s for side in heldout.windows.values() for w in side) / sum(
            r.osl for w in heldout.windows["baseline"] for r in w.requests
        )
        tokens = sum(u * max(1.0, heldout.concurrency / u) for u in users) * shape.osl * SIDE_PAIRS
        return min(1.0, max(0.0, seconds) / (tokens * per_token))

    def _alike(self, users: int, isl: int, osl: int) -> list[list[RequestShape]]:
        """SIDE_PAIRS windows of one shape; each request draws with a seed of its own."""
        drawn = self._sample(self.job.profile.stable(), users * SIDE_PAIRS)
        shapes = [RequestShape(0, isl, osl, **s.sampling()) for s in drawn]
        return [shapes[i : i + users] for i in range(0, len(shapes), users)]

    def _sample(self, profile: TrafficProfile, n: int) -> list[RequestShape]:
        return profile.sample(n, self.job.seed, "heldout", self.context)

    def _scenario(
        self, name: str, what: str, users: int, slices: Sequence[list[RequestShape]], deadline: float | None
    ) -> Scenario:
        """One pair for each slice; past the deadline, if there is one, no pair is begun that would end later."""
        windows: dict[str, list[LoadResult]] = {side: [] for side in SIDES.values()}
        ratios: list[float] = []
        begin = time.monotonic()
        for pair, (order, shapes) in enumerate(zip(interleaving(len(slices)), slices, strict=True)):
            took = (time.monotonic() - begin) / pair if pair else 0.0
            if deadline and pair >= MIN_PAIRS and time.monotonic() + took > deadline:
                break
            for letter in order:
                side = SIDES[letter]
                windows[side].append(self._window(side, shapes, users, f"{name} {pair} {side}"))
            ratios.append(self.job.objective.ratio(windows["winner"][-1], windows["baseline"][-1], self.job.slo))
            self.on_pair(name, pair + 1, _expected(pair + 1, len(slices), begin, deadline), ratios[-1])
        return Scenario(name, what, users, paired_ratio(ratios), {s: tuple(w) for s, w in windows.items()})

    def _window(self, side: str, shapes: Sequence[RequestShape], users: int, label: str) -> LoadResult:
        scope = "warmup" if label == "warmup" else "measured"
        seeds = [f"{self.job.seed} {label} {i}" for i in range(len(shapes))]
        requests = [
            LoadRequest(prompt_ids(s, seed, self.source, scope), s.osl, sampling=s.sampling())
            for s, seed in zip(shapes, seeds, strict=True)
        ]
        result = run_closed_loop(self.targets[side], requests, users)
        for sample, shape in zip(result.requests, shapes, strict=True):
            got = (sample.error, sample.isl, sample.osl, sample.version)
            if got != ("", shape.isl, shape.osl, side):
                wanted = f"{shape.isl} tokens in, {shape.osl} out, from version {side}"
                answer = f"{got[1]} in, {got[2]} out, from {got[3]!r}"
                message = f"The {side} answered a request wrongly: wanted {wanted}; got {answer}. {sample.error}"
                raise MeasureFailed(side, message.strip(), self.servers[side].log_tail())
        return result


def _expected(done: int, most: int, begin: float, deadline: float | None) -> int:
    """How many pairs there will be, from how long those done took."""
    if deadline is None:
        return most
    each = (time.monotonic() - begin) / done
    return min(most, max(MIN_PAIRS, done, int((deadline - begin) / each)))
