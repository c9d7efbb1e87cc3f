"""Where the baseline's time goes, by operator: the baseline's own source with clocks around its parts, run in the host.

The host's own times are diagnostics: they tell agents where to look and never enter a speed-up.
"""

from __future__ import annotations

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.wire import HostStatus, Prepare, Status, TimedBlock
from optimizer.measure.rig import Rig, Script

OPERATORS = ("projections", "head", "attention", "cache", "pointwise")
REPEATS = 3

CLOCKS = '''

import time as _time


class Clocks:
    """Exclusive time by operator: entering an inner part stops the outer part's clock."""

    def __init__(self):
        self.total, self.stack, self.last = {}, [], 0.0

    def turn(self, push=None):
        now = _time.perf_counter()
        if self.stack:
            self.total[self.stack[-1]] = self.total.get(self.stack[-1], 0.0) + now - self.last
        self.last = now
        self.stack.append(push) if push else self.stack.pop()

    def around(self, operator, function):
        def timed(*args, **kwargs):
            self.turn(operator)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
        return timed


CLOCK = Clocks()


class TimedFunctional:
    def __init__(self, functional):
        self.functional = functional
        self.scaled_dot_product_attention = CLOCK.around("attention", functional.scaled_dot_product_attention)
        self.timed_head = CLOCK.around("head", functional.linear)

    def linear(self, *args, **kwargs):
        inside = CLOCK.stack and CLOCK.stack[-1] == "projections"
        return (self.functional.linear if inside else self.timed_head)(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.functional, name)


class Probe(Forward):
    PARTS = {"norm": "pointwise", "linear": "projections", "mlp": "pointwise", "attention": "cache",
             "decode_attention": "cache", "prefill_attention": "attention"}

    def __init__(self, model, settings):
        super().__init__(model, settings)
        for name, operator in self.PARTS.items():
            if hasattr(self, name):
                setattr(self, name, CLOCK.around(operator, getattr(self, name)))

    def __call__(self, batch, kv):
        return CLOCK.around("pointwise", super().__call__)(batch, kv)

    @property
    def dispatch(self):
        told = {name: repr(seconds) for name, seconds in CLOCK.total.items()}
        CLOCK.total.clear()
        return told


def modules():
    """This one and those whose classes the forward pass is built on."""
    import sys

    return {id(m): m for m in (sys.modules.get(c.__module__) for c in Forward.__mro__) if hasattr(m, "Forward")}.values()


for module in modules():
    if hasattr(module, "F"):
        module.F = TimedFunctional(module.F)
    if hasattr(module, "rotate"):
        module.rotate = CLOCK.around("pointwise", module.rotate)


def build(model, settings):
    return Probe(model, settings)
'''


def probe_artifact(store: ArtifactStore, baseline: Artifact) -> Artifact:
    files = baseline.files()
    return store.put(
        files | {"forward.py": files["forward.py"] + CLOCKS},
        name="operator probe",
        focus="baseline",
        settings=dict(baseline.manifest.settings),
    )


def operator_seconds(
    host: HostClient, probe: Artifact, decode: Script, prefill: Script, kv_bytes: int
) -> dict[str, dict[str, float]]:
    """Seconds of one step by phase and operator, at all layers. Raises HostFailure."""
    rig = Rig(host, probe, kv_bytes=kv_bytes)
    rig.play(decode)
    found: dict[str, dict[str, float]] = {}
    for phase, script in (("prefill", prefill), ("decode", decode)):
        tables = rig.tables(script)
        steps = script.prefill_steps(tables) if phase == "prefill" else script.decode_steps(tables)
        host.call(Prepare(f"probe-{phase}", [rig.batch(s) for s in steps]))
        host.call(TimedBlock(probe.hash, f"probe-{phase}"))  # warm
        host.call(Status())  # empties the clocks
        host.call(TimedBlock(probe.hash, f"probe-{phase}", repeats=REPEATS))
        status = host.call(Status())
        assert isinstance(status, HostStatus)
        runs = REPEATS * len(steps)
        found[phase] = {name: float(status.dispatch.get(name, 0.0)) / runs for name in OPERATORS}
        host.call(Prepare(f"probe-{phase}"))
    rig.unload()
    return found


def shares(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        phase: {op: t / (sum(parts.values()) or 1.0) for op, t in parts.items()} for phase, parts in seconds.items()
    }
