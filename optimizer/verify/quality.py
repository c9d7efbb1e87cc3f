"""Output quality: candidate and baseline judged alike against float32, teacher-forced, in prefill and in decode.

`near`: the candidate may be no further from float32 than the same-precision baseline is, within stated bounds.
`quantised`: declared before the search; a fixed bound. `exact`: the baseline's bytes, at each of two thread counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.client import HostClient
from optimizer.measure.rig import Rig, Script
from optimizer.measure.values import MARGIN, Distance, distance, perplexity, same_bits
from optimizer.records import Check
from optimizer.verify.bench import Bench

PASSAGES, PROMPT, DECODED = 4, 80, 40
ROUNDING = 1e-6  # KL by which even float32 programs differ when they add in another order
MIN_AGREE = 0.999
QUANTISED_KL = 0.01


@dataclass(frozen=True, slots=True)
class Forced:
    """Logits of one side on the same text: prompt rows and decoded rows, and the tokens that followed each."""

    prefill: np.ndarray
    decode: np.ndarray


def teacher_forced(rig: Rig, script: Script) -> Forced:
    rows = rig.play(script)
    prompt = len(script.prompts[0])
    return Forced(np.concatenate([r[:prompt] for r in rows]), np.concatenate([r[prompt:] for r in rows]))


def passages(bench: Bench, scale: float = 1.0) -> Script:
    """Running text: the forced tokens go on where the prompt ends."""
    prompt, decoded = max(8, int(PROMPT * scale)), max(8, int(DECODED * scale))
    texts = [bench.passage(prompt + decoded) for _ in range(PASSAGES)]
    return Script(tuple(t[:prompt] for t in texts), tuple(t[prompt:] for t in texts), every_row=True)


def judge(bench: Bench, reference_host: HostClient, tolerance: str = "near", scale: float = 1.0) -> list[Check]:
    """`reference_host` holds the model in float32 and runs the baseline's source. `scale` shortens the text."""
    script = passages(bench, scale)
    reference = Rig(reference_host, bench.baseline, bench.layers)
    truth = teacher_forced(reference, script)
    reference.unload()
    sides = {"candidate": teacher_forced(bench.rig, script), "baseline": teacher_forced(bench.base, script)}
    checks: list[Check] = []
    for phase in ("prefill", "decode"):
        ours, own = (distance(getattr(truth, phase), getattr(sides[side], phase)) for side in ("candidate", "baseline"))
        checks += near(bench, phase, ours, own) if tolerance != "quantised" else quantised(bench, phase, ours)
    checks.append(text_loss(bench, script, truth, sides["candidate"], sides["baseline"]))
    if tolerance == "exact":
        checks.append(exact(bench, script, sides["candidate"], sides["baseline"]))
    return checks


def near(bench: Bench, phase: str, ours: Distance, own: Distance) -> list[Check]:
    kl_limit = max(min(1.25 * own.mean_kl, own.mean_kl + 0.001), ROUNDING)
    change_limit = max(1.5 * own.p99_change, own.p99_change + 0.02)
    agree_limit = min(MIN_AGREE, own.agree)
    kl_detail = f"the baseline's own is {own.mean_kl:.3g}, over {ours.rows} rows"
    sure = f"where float32 is sure by {MARGIN:g} nats: {ours.margin_rows} of {ours.rows} rows"
    change_detail = f"the baseline's own is {own.p99_change:.3g}"

    def row(case: str, value: float, limit: float, unit: str, ok: bool, detail: str) -> Check:
        return bench.result("distance from float32", "quality", f"{case}, {phase}", value, limit, unit, ok, detail)

    return [
        row("mean KL", ours.mean_kl, kl_limit, "nats", ours.mean_kl <= kl_limit, kl_detail),
        row("top token", ours.agree, agree_limit, "share that agrees", ours.agree >= agree_limit, sure),
        row("p99 change", ours.p99_change, change_limit, "probability", ours.p99_change <= change_limit, change_detail),
    ]


def quantised(bench: Bench, phase: str, ours: Distance) -> list[Check]:
    ok = ours.mean_kl <= QUANTISED_KL
    case = f"mean KL, {phase}"
    return [bench.result("distance from float32", "quality", case, ours.mean_kl, QUANTISED_KL, "nats", ok)]


def text_loss(bench: Bench, script: Script, truth: Forced, ours: Forced, own: Forced) -> Check:
    """Perplexity of the decoded part; shown, and bounded by the baseline's own change."""
    targets = np.concatenate([np.asarray(f[1:]) for f in script.forced])
    keep = np.concatenate([np.arange(len(f) - 1) + i * len(f) for i, f in enumerate(script.forced)])
    exact_ppl, ours_ppl, own_ppl = (perplexity(side.decode[keep], targets) for side in (truth, ours, own))
    change, limit = abs(ours_ppl / exact_ppl - 1), max(1.5 * abs(own_ppl / exact_ppl - 1), 0.01)
    detail = f"float32 {exact_ppl:.2f}, baseline {own_ppl:.2f}, candidate {ours_ppl:.2f}"
    return bench.result("perplexity", "quality", "change from float32", change, limit, "share", change <= limit, detail)


def exact(bench: Bench, script: Script, ours: Forced, own: Forced) -> Check:
    """Bytes equal to the baseline's, with all threads and with one."""
    differ = same_bits(ours.prefill, own.prefill) + same_bits(ours.decode, own.decode)
    host = HostClient(bench.host.model, dtype=bench.host.dtype, threads=1, kv_bytes=bench.host.kv_bytes)
    with host:
        one = replace(bench, host=host, rigs={})
        a, b = teacher_forced(one.rig, script), teacher_forced(one.base, script)
    differ += same_bits(a.prefill, b.prefill) + same_bits(a.decode, b.decode)
    case = f"{bench.host.threads} threads and 1"
    return bench.result("exactness", "quality", case, float(differ), 0.0, "values that differ", differ == 0)
