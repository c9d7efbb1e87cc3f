"""What the search makes of equal programs: beside a compiler at work, and how often one is declared faster."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.artifacts import Artifact
from optimizer.agents.programs.program import Program
from optimizer.ahead import Group
from optimizer.builder import Builder
from optimizer.config import Budget
from optimizer.lab import Lab
from optimizer.ledger import Ledger
from optimizer.measure.rig import Rig
from optimizer.measure.stats import paired_ratio
from optimizer.measure.tiers import DECODE_STEPS
from optimizer.session import Session
from tests.bench.figures import Figure
from tests.bench.searching import PART, as_proposal, built, demo_lab

AA_CANDIDATES = 200
MOST_FALSE_WINS = 0.01
DISTURBED_PAIRS = 40


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
        Figure("declared faster after tier 2", share, "share", MOST_FALSE_WINS, "at most"),
    ]


class Forgetful(dict[str, str]):
    """Behaviours that nobody remembers."""

    def setdefault(self, key: str, default: str = "") -> str:
        return default
