"""Experiments an hour of the search on the demo, beside loops that take one candidate after the other on the same machine.

    make bench NAME=search                    everything, under 20 minutes
    python -m tests.bench.search rate swaps   parts alone

Counted are programs of distinct behaviour whose checks passed in tier 1; those on all layers are shown apart. A loop's rate is
3,600 over the seconds of one candidate, each part of which is measured here, but for the 20 s of thinking, which are stated.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from engine.artifacts import Artifact
from optimizer.agents import make_agents
from optimizer.agents.programs.program import Program
from optimizer.ahead import Group
from optimizer.builder import Builder
from optimizer.config import Budget
from optimizer.lab import Lab, Scene
from optimizer.ledger import Ledger
from optimizer.measure.end_to_end import MIN_PAIRS
from optimizer.measure.load import LoadRequest, Target, run_closed_loop
from optimizer.measure.rig import Rig
from optimizer.measure.servers import ServerSpec, api_server
from optimizer.measure.stats import paired_ratio
from optimizer.measure.tiers import DECODE_STEPS
from optimizer.records import Experiment, State
from optimizer.session import Session
from tests import paths
from tests.bench import figures, searching, swap, vllm_server
from tests.bench.figures import Figure
from tests.bench.searching import PART, Points, Slow, as_proposal, demo_lab

PEERS = Path(os.environ.get("POLYMORPH_PEERS", "/nonexistent"))
SEARCH_S = 180.0
USERS = 4  # of the demo's traffic
REQUESTS = (
    MIN_PAIRS * USERS
)  # of the tier-2 workload: as many windows as a decision over HTTP takes of one side at least
COLD_STARTS = 2
AA_CANDIDATES = 200
DISTURBED_PAIRS = 40
GOALS = {"vllm": 252.0, "ours": 40.0, "swap": 52.0, "utilisation": 0.9, "false wins": 0.01}


def run(parts: Sequence[str] = ()) -> list[Figure]:
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    found: dict[str, float] = {}
    rows: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in parts or PARTS:
            start = time.monotonic()
            rows += PARTS[name](Path(folder), found)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return rows + ratios(found)


def ratios(found: dict[str, float]) -> list[Figure]:
    """What needs figures of several parts; left out where one is missing."""
    rows = []
    if "rate" in found:
        for loop, title in (("vllm", "thinking 20 s and vLLM restarted"), ("ours", "our server restarted")):
            if loop in found:
                ratio = found["rate"] * found[loop] / 3600
                rows.append(Figure(f"experiments an hour over {title}, tier-2 workload", ratio, "x", GOALS[loop]))
    kinds = [k for k in found if k.startswith("swap ")]
    for cold, title, goal in (("vllm cold", "vLLM's", GOALS["swap"]), ("our cold", "our own", None)):
        if cold in found:
            rows += [Figure(f"{title} cold start over {k}", found[cold] / found[k], "x", goal) for k in kinds]
    return rows


def rate(data: Path, found: dict[str, float]) -> list[Figure]:
    """Ours: the built-in agents, points of the kernel's parameters, and an agent that takes 20 s a thought."""
    thinker = Slow(seed=1)
    ledger, _, seconds = searching.search(data, SEARCH_S, [*make_agents(0), Points(), thinker])
    counts = ledger.counts()
    found["rate"] = counts["distinct_behaviours"] * 3600 / seconds
    first = [e for e in ledger.experiments.values() if e.tier == 1 and e.state is not State.FAILED]
    lost = [Figure(f"lost: {item['why']}", item["seconds"], "s") for item in ledger.time_lost()]
    return [
        Figure("seconds searched", seconds, "s"),
        Figure("behaviour-distinct programs, checks passed in tier 1", counts["distinct_behaviours"], "programs"),
        Figure("those an hour", found["rate"], "programs/h"),
        Figure("on all layers (tier 2)", counts["tier2"], "candidates"),
        Figure("failed", counts["failed"], "candidates"),
        Figure("duplicates, not measured", counts["duplicates"], "candidates"),
        Figure("came back for more pairs", sum(e.visit > 1 for e in first), "visits"),
        Figure("pairs of a visit, mean", mean_pairs(first), "pairs"),
        Figure("timed blocks taken again: other work overlapped", ledger.disturbed, "blocks"),
        Figure("best so far over the baseline, tier 2", ledger.best_ratio, "x"),
        Figure("utilisation beside an agent that takes 20 s a thought", ledger.utilisation, "", GOALS["utilisation"]),
        Figure("thoughts that agent had", thinker.thoughts, "thoughts"),
        *lost,
    ]


def mean_pairs(first: Sequence[Experiment]) -> float:
    return statistics.mean([len(e.samples) for e in first if e.visit == 1 and e.samples] or [0])


def workload(data: Path) -> list[LoadRequest]:
    """Requests of the demo's search window."""
    scene = Scene.of(searching.config_of(data, 600))
    return [LoadRequest(w.prompt, w.osl) for w in scene.requests(REQUESTS, 11)]


def one_by_one(data: Path, found: dict[str, float]) -> list[Figure]:
    """Our own engine server restarted for each candidate: seconds from its start to the workload's end."""
    artifact, requests = built(data, Program.of([PART])), workload(data)
    spec = ServerSpec(paths.demo_model(), threads=0, name="demo")
    cold, loads = timed_loop(lambda: served(spec, artifact, data), requests, "demo", 2 * COLD_STARTS)
    found["ours"], found["our cold"] = (
        statistics.median(c + w for c, w in zip(cold, loads, strict=True)),
        statistics.median(cold),
    )
    return loop_figures("our server", cold, loads, 0.0)


def status_quo(data: Path, found: dict[str, float]) -> list[Figure]:
    """An agent thinks 20 s (stated), vLLM restarts, the workload runs over HTTP."""
    requests = workload(data)
    cold, loads = timed_loop(lambda: vllm_server.started(PEERS), requests, "smol", COLD_STARTS)
    if not cold:
        return [Figure("vLLM", "missing", "", "installed under POLYMORPH_PEERS", "equal")]
    found["vllm cold"] = statistics.median(cold)
    found["vllm"] = searching.THOUGHT_S + statistics.median(c + w for c, w in zip(cold, loads, strict=True))
    return loop_figures("vLLM", cold, loads, searching.THOUGHT_S)


def timed_loop(
    start: Callable[[], AbstractContextManager[str | None]], requests: list[LoadRequest], model: str, times: int
) -> tuple[list[float], list[float]]:
    """Cold starts and workloads in seconds; empty when the server does not come up."""
    cold, loads = [], []
    for _ in range(times):
        begun = time.monotonic()
        with start() as url:
            if url is None:
                return [], []
            cold.append(time.monotonic() - begun)
            result = run_closed_loop(Target(url, model), requests, USERS)
            assert not result.failed, result.failed[0].error
            loads.append(result.duration_s)
    return cold, loads


@contextmanager
def served(spec: ServerSpec, artifact: Artifact, data: Path) -> Iterator[str]:
    with api_server(spec, artifact.path, "ours", data / "logs") as server:
        yield server.url


def loop_figures(name: str, cold: list[float], loads: list[float], thought_s: float) -> list[Figure]:
    whole = thought_s + statistics.median(c + w for c, w in zip(cold, loads, strict=True))
    return [
        Figure(f"{name}: cold start to serving", statistics.median(cold), "s"),
        Figure(f"{name}: tier-2 workload, {REQUESTS} requests, {USERS} users", statistics.median(loads), "s"),
        Figure(f"{name}: one candidate after the other", 3600 / whole, "candidates/h"),
    ]


def swaps(data: Path, found: dict[str, float]) -> list[Figure]:
    times = {kind: statistics.median(seconds) for kind, seconds in swap.by_kind(data).items()}
    found |= {f"swap {kind}": seconds for kind, seconds in times.items()}
    return [Figure(f"hot swap, {kind}", seconds, "s", swap.GOALS[kind], "at most") for kind, seconds in times.items()]


def disturbance(data: Path, found: dict[str, float]) -> list[Figure]:
    """One program against its twin at tier 1: alone, beside a compiler that stands still while we time, and beside one that
    does not.
    """
    with demo_lab(data, 600) as (_, ledger, lab):
        program = Program.of([PART])
        sides = [built(data, program), built(data, program, "its twin")]
        rows = []
        for title, hold in (("alone", None), ("beside a suspended compiler", True), ("beside a free compiler", False)):
            with compiling(data, ledger, hold):
                seconds, pairs = aa_pairs(lab, *sides)
            ratio = paired_ratio(pairs)
            rows += [
                Figure(f"{title}: decode step of the few layers", seconds * 1e3, "ms"),
                Figure(f"{title}: A/A ratio", ratio.ratio, "x"),
                Figure(f"{title}: A/A pairs, p10 to p90", f"{ratio.p10:.3f} to {ratio.p90:.3f}", "x"),
            ]
    return rows


def aa_pairs(lab: Lab, one: Artifact, twin: Artifact) -> tuple[float, list[float]]:
    """Median seconds of a step, and paired ratios of the two."""
    tier, seconds, pairs = lab.one, [], []
    lab.tier_one(twin, one, 60)  # the incumbent is resident, the content in its pool
    rig = Rig(lab.host, twin, tier.layers, tier.kv_bytes)
    rig.play(tier.expected.script)
    for i in range(DISTURBED_PAIRS):
        script = tier._fresh()["decode"]
        for side in (tier.rival, rig):
            tier._prepare(side, "decode", script)
        order = (tier.rival, rig) if i % 2 == 0 else (rig, tier.rival)
        times = {side.artifact.hash: tier._timed(side, "decode")[0] for side in order}
        seconds.append(times[one.hash] / DECODE_STEPS)
        pairs.append(times[one.hash] / times[twin.hash])
    rig.unload()
    return statistics.median(seconds), pairs


@contextmanager
def compiling(data: Path, ledger: Ledger, hold: bool | None) -> Iterator[None]:
    """A compiler at work all the while; None: none, `hold`: suspended whenever something is timed."""
    if hold is None:
        yield
        return
    group, program = Group(), Program.of([PART])
    stop, builder = threading.Event(), Builder(data)

    def work() -> None:
        for i in range(1000):
            if stop.is_set():
                return
            unseen = as_proposal(program, "disturber", f"{hold} {i} {time.monotonic()}")
            builder.build(unseen, group.run)

    if hold:
        ledger.quiet.on_hold.append(group.suspend)
        ledger.quiet.on_release.append(group.go_on)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        group.end()
        thread.join()
        if hold:
            ledger.quiet.on_hold.remove(group.suspend)
            ledger.quiet.on_release.remove(group.go_on)


def false_wins(data: Path, found: dict[str, float]) -> list[Figure]:
    """Candidates of other text that are the incumbent's very program, with the recognition of behaviours off."""
    with demo_lab(data, 3600) as (config, ledger, lab):
        session = Session(config, [], Budget(config.budget_s), ledger, lab)
        trials, program = session.trials, Program.of([PART])
        trials.steps = Forgetful()
        first = session.builder.build(as_proposal(program))
        trials.measure(first, session.predict(as_proposal(program)))
        assert trials.incumbent, "the whole step beats the baseline"
        seemed = confirmed = 0
        for i in range(AA_CANDIDATES):
            proposal = as_proposal(program, "twin", f"twin {i}")
            proposal.files["decode_step.cpp"] = program.files()["decode_step.cpp"]
            ended = trials.measure(session.builder.build(proposal), session.predict(proposal))
            seemed += ended.tier == 2
            confirmed += ended.tier == 2 and ended.leads
            while trials.due(idle=i == AA_CANDIDATES - 1):
                built_again, estimate, earlier = trials.next_due()
                ended = trials.measure(built_again, estimate, earlier)
                seemed += ended.tier == 2
                confirmed += ended.tier == 2 and ended.leads
    share = confirmed / AA_CANDIDATES
    return [
        Figure("equal programs of other text", AA_CANDIDATES, "candidates"),
        Figure("that tier 1 took for faster", seemed, "candidates"),
        Figure("declared faster after tier 2", share, "share", GOALS["false wins"], "at most"),
    ]


class Forgetful(dict[str, str]):
    """Behaviours that nobody remembers."""

    def setdefault(self, key: str, default: str = "") -> str:
        return default


def built(data: Path, program: Program, mark: str = "") -> Artifact:
    ended = Builder(data).build(as_proposal(program, mark=mark))
    assert not ended.failure, ended.failure
    return ended.artifact


PARTS: dict[str, Callable[[Path, dict[str, float]], list[Figure]]] = {
    "rate": rate,
    "one_by_one": one_by_one,
    "status_quo": status_quo,
    "swaps": swaps,
    "disturbance": disturbance,
    "false_wins": false_wins,
}

if __name__ == "__main__":
    print(figures.write("search", run(sys.argv[1:])))
