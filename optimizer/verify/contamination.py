"""Contamination, step by step: a request's logits must not depend on anything but its own tokens, to the bit.

The candidate is compared with itself, in pairs of runs whose step shapes are equal and whose surroundings differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optimizer.measure.rig import Script, Tokens
from optimizer.measure.tiers import MAX_KL
from optimizer.measure.values import distance
from optimizer.records import Check
from optimizer.verify.bench import FORCED, Bench

FINITE = -37.25  # representable in every float format, far from any activation
CHUNK = 16


def poison(bench: Bench) -> list[Check]:
    """Free blocks and page tails hold NaN, then foreign numbers: no bit of the output may change."""
    rig, script = bench.rig, bench.script(bench.boundary_lengths())
    tables = rig.tables(script, range(1, rig.loaded.blocks))
    used = {b for table in tables for b in table}
    free = [b for b in bench.all_blocks() if b not in used]

    def run(value: float) -> list[np.ndarray]:
        rig.fill(list(bench.all_blocks()), value)
        return rig.play(script, tables, lambda n: rig.fill(free, value))

    clean = run(0.0)
    return [
        bench.equal("poison", case, clean, run(value))
        for case, value in (
            ("NaN in free blocks and tails", float("nan")),
            ("numbers in free blocks and tails", FINITE),
        )
    ]


def neighbours(bench: Bench) -> list[Check]:
    """The first sequence's logits while its neighbours say other things, or stand in another order."""
    size = bench.block_size
    script = bench.script([size + 3, 2 * size, 2 * size, 2 * size])
    ours = bench.rig.play(script)[:1]
    others = bench.script([size + 3, 2 * size, 2 * size, 2 * size])
    text = replace(
        script, prompts=script.prompts[:1] + others.prompts[1:], forced=script.forced[:1] + others.forced[1:]
    )

    def turned(items: tuple) -> tuple:
        return items[:1] + items[:0:-1]

    order = replace(script, prompts=turned(script.prompts), forced=turned(script.forced))
    return [
        bench.equal("neighbours", "other text", ours, bench.rig.play(text)[:1]),
        bench.equal("neighbours", "other order", ours, bench.rig.play(order)[:1]),
    ]


def block_history(bench: Bench) -> list[Check]:
    """The same sequences in blocks that held another request just before, and in other blocks."""
    rig, lengths = bench.rig, bench.boundary_lengths()
    script, foreign = bench.script(lengths), bench.script(lengths)
    tables = rig.tables(script)
    used = max(b for table in tables for b in table) + 1
    rig.play(foreign, tables)
    after = rig.play(script, tables)
    clean = rig.play(script, rig.tables(script, range(used, rig.loaded.blocks)))
    moved = rig.tables(script, [int(b) for b in bench.rng.permutation(rig.loaded.blocks)])
    return [
        bench.equal("block history", "blocks held by another request", clean, after),
        bench.equal("block history", "other blocks", clean, rig.play(script, moved)),
    ]


def request_ids(bench: Bench) -> list[Check]:
    """A request that takes over the number of one that was cancelled gets nothing of it."""
    rig, lengths = bench.rig, [bench.block_size + 2, 9]
    script = bench.script(lengths)
    clean = rig.play(replace(script, request_ids=(701, 702)))
    cancelled = replace(bench.script(lengths), request_ids=(801, 802))
    for step in cancelled.steps(rig.tables(cancelled))[:2]:
        rig.step(step)
    again = rig.play(replace(script, request_ids=(801, 802)))
    return [bench.equal("request numbers", "cancelled and taken again", clean, again)]


def repeats(bench: Bench) -> list[Check]:
    """The same prompts four times over give the same bits four times."""
    script = bench.script([bench.block_size + 5, 12])
    runs = [bench.rig.play(script) for _ in range(4)]
    return [bench.equal("repeats", "four times", runs[0] * 3, runs[1] + runs[2] + runs[3])]


def secrets(bench: Bench) -> list[Check]:
    """A secret in a neighbour's prompt, and in the blocks before, moves no logit of one who begins to guess it."""
    size = bench.block_size
    opening, tail, forced = bench.passage(6), bench.noise(3), bench.noise(FORCED)

    def guess(secret: Tokens) -> list[np.ndarray]:
        bench.rig.play(Script((opening + secret,), (forced,)))
        return bench.rig.play(Script((opening + tail, opening + secret), (forced, forced)))[:1]

    return [
        bench.equal("planted secret", "another's prompt", guess(bench.noise(2 * size)), guess(bench.noise(2 * size)))
    ]


def same_prefix(bench: Bench) -> list[Check]:
    """Two requests with one prefix in one step: the second has its own blocks and must write them itself."""
    size = bench.block_size
    prefix, tail = bench.passage(size + 4), bench.noise(5)
    forced = bench.noise(FORCED)
    other = bench.noise(FORCED)
    twin = Script((prefix + bench.noise(5), prefix + tail), (other, forced))
    alien = Script((bench.passage(size + 9), prefix + tail), (other, forced))
    bench.rig.fill(list(bench.all_blocks()), FINITE)
    expected = bench.rig.play(alien)[1:]
    bench.rig.fill(list(bench.all_blocks()), FINITE)
    return [bench.equal("same prefix", "two in one step", expected, bench.rig.play(twin)[1:])]


def boundaries(bench: Bench) -> list[Check]:
    """Lengths around block and chunk edges, whole and in chunks: near the baseline's logits at every one of them.

    Step shapes differ here, so that bits may; a wrong edge is off by far more.
    """
    lengths = sorted({*bench.boundary_lengths(), CHUNK - 1, CHUNK, CHUNK + 1})
    checks = []
    for case, chunk in (("whole prefill", 0), (f"chunks of {CHUNK}", CHUNK), ("chunks of 1", 1)):
        script = bench.script(lengths if chunk != 1 else lengths[:2], chunk=chunk)
        plain = replace(script, chunk=0)
        expected, got = bench.base.play(plain), bench.rig.play(script)
        worst = max(distance(e, g).mean_kl for e, g in zip(expected, got, strict=True))
        own = (
            max(distance(e, g).mean_kl for e, g in zip(expected, bench.base.play(script), strict=True))
            if chunk
            else 0.0
        )
        limit = max(MAX_KL, 4 * own)
        checks.append(
            bench.result("boundary lengths", "contamination", case, worst, limit, "worst mean KL", worst <= limit)
        )
    return checks


def versions(bench: Bench) -> list[Check]:
    """Candidate, baseline, candidate again in one host: each goes on as if it were alone."""
    script = bench.script([bench.block_size + 2, 7])
    alone = bench.rig.play(script)
    between: list[np.ndarray] = []

    def interrupt(n: int) -> None:
        if n == 2:
            between.extend(bench.base.play(bench.witness_script))

    again = bench.rig.play(script, before_step=interrupt)
    return [
        bench.equal("two versions", "candidate, baseline, candidate", alone, again),
        bench.equal("two versions", "the baseline beside it", bench.witness, between),
    ]


Checker = Callable[[Bench], list[Check]]
CHECKS: dict[str, Checker] = {
    "poison": poison,
    "neighbours": neighbours,
    "block history": block_history,
    "request numbers": request_ids,
    "repeats": repeats,
    "planted secret": secrets,
    "same prefix": same_prefix,
    "boundary lengths": boundaries,
    "two versions": versions,
}
