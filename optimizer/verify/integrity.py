"""Integrity: the candidate does the work it is named for, and leaves everything else as it was."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine.artifacts import ArtifactStore
from engine.client import HostFailure
from engine.wire import BlockDone, HostStatus, Prepare, Status, TimedBlock
from optimizer.measure.rig import Rig, Script
from optimizer.measure.values import same_bits
from optimizer.records import Check
from optimizer.verify.bench import FORCED, Bench

SLOWED_LIMIT = 1.25
SLOWED_SURELY = 3.0  # no passing disturbance: not measured again
IDLE_S, IDLE_LIMIT = 0.4, 0.1
FLOOR_SHARE = 0.8
TRIES = 3


def constant_output(bench: Bench) -> list[Check]:
    """Other prompts give other logits, and so does one early token of a prompt."""
    prompt = bench.passage(24)
    other = (prompt[0], (prompt[1] + 17) % bench.config.vocab_size, *prompt[2:])
    forced = bench.noise(FORCED)
    base = bench.rig.play(Script((prompt,), (forced,)))[0]
    same = 0
    for changed in (bench.passage(24), other):
        rows = bench.rig.play(Script((changed,), (forced,)))[0]
        same += sum(same_bits(a, b) == 0 for a, b in zip(base, rows, strict=True))
    return [
        _row(bench, "constant output", "other prompt, one other token", same, 0, "rows that did not change", same == 0)
    ]


def inputs_kept(bench: Bench) -> list[Check]:
    """A block of steps run three times from the same buffers, and the same steps run once from new ones, agree."""
    rig = bench.rig
    script = bench.script([rig.block_size + 1, 11])
    tables = rig.tables(script)
    rig.play(script, tables)
    steps = script.decode_steps(tables)
    plain = [int(t) for step in steps for t in rig.step(step).argmax(-1)]
    bench.host.call(Prepare("kept", [rig.batch(s) for s in steps]))
    differ = 0
    for repeats in (1, 3):
        done = bench.host.call(TimedBlock(bench.candidate.hash, "kept", bench.layers, repeats))
        assert isinstance(done, BlockDone)
        differ += sum(a != b for a, b in zip(done.argmax, plain, strict=True))
    return [_row(bench, "inputs kept", "timed and untimed", differ, 0, "tokens that differ", differ == 0)]


def weights_kept(bench: Bench) -> list[Check]:
    """The baseline in the same process answers as it did before the candidate came: every weight is in its logits."""
    bench.rig.play(bench.script([9]))
    again = bench.base.play(bench.witness_script)
    differ = sum(same_bits(a, b) for a, b in zip(bench.witness, again, strict=True))
    return [_row(bench, "weights kept", "the baseline's answers", differ, 0, "values that differ", differ == 0)]


def baseline_speed(bench: Bench) -> list[Check]:
    """The baseline runs as fast beside the candidate as it did before it; the host's threads are as they were."""
    bench.rig.play(bench.script([9]))
    ratio = min(bench.baseline_seconds() / bench.witness_s for _ in range(1))
    for _ in range(TRIES):
        if ratio <= SLOWED_LIMIT or ratio > SLOWED_SURELY:
            break
        ratio = min(ratio, bench.baseline_seconds() / bench.witness_s)
    status = bench.host.call(Status())
    assert isinstance(status, HostStatus)
    changed = status.threads - bench.host.threads
    case = "beside the candidate"
    return [
        _row(bench, "baseline speed", case, ratio, SLOWED_LIMIT, "times its own time", ratio <= SLOWED_LIMIT),
        _row(bench, "threads", "the host's", changed, 0, "threads more", changed == 0),
    ]


def idle(bench: Bench) -> list[Check]:
    """A host that waits uses no processor time: no leftover threads, no endless spinning."""
    bench.rig.play(bench.script([9]))
    share = 1.0
    for _ in range(TRIES):
        before, start = _cpu_seconds(bench.host.pid), time.perf_counter()
        time.sleep(IDLE_S)  # the time over which idleness is measured
        share = min(share, (_cpu_seconds(bench.host.pid) - before) / (time.perf_counter() - start))
        if share <= IDLE_LIMIT:
            break
    return [_row(bench, "idle", "after a step", share, IDLE_LIMIT, "of a core", share <= IDLE_LIMIT)]


def floor(bench: Bench, floor_s: float) -> list[Check]:
    """A timed decode step takes at least as long as reading the weights, also when the same steps come again."""
    if not floor_s:
        return []
    rig = bench.rig
    script = bench.script([rig.block_size] * bench.concurrency)
    tables = rig.tables(script)
    rig.play(script, tables)
    bench.host.call(Prepare("floor", [rig.batch(s) for s in script.decode_steps(tables)]))
    repeats = 3
    start = time.perf_counter()
    bench.host.call(TimedBlock(bench.candidate.hash, "floor", bench.layers, repeats))
    seconds = (time.perf_counter() - start) / (repeats * FORCED)
    limit = FLOOR_SHARE * floor_s
    return [_row(bench, "physical floor", "decode step", seconds, limit, "s at least", seconds >= limit)]


def application(bench: Bench, store: ArtifactStore) -> list[Check]:
    """The kernels a candidate brings are the ones that run: without its libraries it must not work."""
    manifest = bench.candidate.manifest
    if not manifest.libraries:
        detail = "the host ran the very source shown: its hash was checked when it was loaded"
        return [_row(bench, "proof of application", "source by hash", 0, 0, "files that differ", True, detail)]
    stub = store.put(
        bench.candidate.files(),
        name=manifest.name,
        focus=manifest.focus,
        mechanism=manifest.mechanism,
        settings=manifest.settings,
        precision=manifest.precision,
    )
    try:
        Rig(bench.host, stub, bench.layers, blocks=bench.pool_blocks).play(bench.script([20]))
        worked, detail = 1, "it also works without the kernels it brings: they are not what was measured"
    except HostFailure as failure:
        worked, detail = 0, f"without them: {failure.message[:120]}"
    names = ", ".join(manifest.libraries)
    return [_row(bench, "proof of application", f"without {names}", worked, 0, "runs that worked", not worked, detail)]


def _row(
    bench: Bench, check: str, case: str, value: float, limit: float, unit: str, ok: bool, detail: str = ""
) -> Check:
    return bench.result(check, "integrity", case, float(value), float(limit), unit, ok, detail)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


CHECKS = {
    "constant output": constant_output,
    "inputs kept": inputs_kept,
    "weights kept": weights_kept,
    "baseline speed": baseline_speed,
    "idle": idle,
}
