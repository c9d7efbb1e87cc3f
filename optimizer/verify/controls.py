"""Negative controls: every check runs against its planted fault on this machine and model, on a few layers.

Controls are run once for each version of checks, baseline and weights, and kept in `<data>/controls.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.client import HostClient, HostFailure
from engine.wire import Unload
from kernels.build import compile_cpp, has_compiler
from optimizer.records import Check, Verdict
from optimizer.verify import contamination, experts, integrity, quality, serving
from optimizer.verify.bench import FORCED, Bench
from optimizer.verify.faults import CONTROLS, Fault
from optimizer.verify.runner import Verifier

LAYERS = 2
FILE = "controls.json"


def known(verifier: Verifier, data_dir: Path) -> dict[str, bool]:
    """check -> whether its fault was caught, as far as it was tried here."""
    return _read(Path(data_dir) / FILE).get(_key(verifier), {})


def caught(verifier: Verifier, data_dir: Path, stop_at: float = float("inf")) -> dict[str, bool]:
    """As `known`, after trying what was not. What `stop_at` (of time.monotonic) left undone is not in the answer."""
    path, found = Path(data_dir) / FILE, known(verifier, data_dir)
    missing = [name for name in applicable(verifier) if name not in found]
    if missing:
        found |= run(verifier, missing, stop_at)
        _write(path, _read(path) | {_key(verifier): found})
    return found


def applicable(verifier: Verifier) -> list[str]:
    """The checks whose planted fault can be tried on this machine and model."""
    without = {"proof of application"} if not has_compiler() else set()
    if verifier.config.experts is None:
        without |= set(experts.CHECKS)
    return [name for name in CONTROLS if name not in without]


def mark(checks: list[Check], found: dict[str, bool]) -> list[Check]:
    return [replace(c, control_caught=found.get(c.check)) for c in checks]


def run(verifier: Verifier, names: list[str], stop_at: float = float("inf")) -> dict[str, bool]:
    found: dict[str, bool] = {}
    groups: dict[tuple[str, bool], list[str]] = {}  # faults that spoil their host share one only with themselves
    for name in names:
        even = verifier.config.experts is not None and (name in contamination.CHECKS or name in serving.CHECKS)
        groups.setdefault((CONTROLS[name].name if CONTROLS[name].dirty else "", even), []).append(name)
    for (_, even), group in groups.items():
        with _hosts(verifier, any(n in _QUALITY for n in group), even) as (host, reference):
            for name in group:
                verifier.between()
                if time.monotonic() > stop_at:
                    return found
                found[name] = check(verifier, host, reference, name)
                if not host.alive:
                    host.restart()
    return found


def check(verifier: Verifier, host: HostClient, reference: HostClient | None, name: str) -> bool:
    """Whether the check called `name` fails the program made to fail it, by verdict or because its logits were refused.

    A planted program that merely crashes was not caught by the check.
    """
    fault = CONTROLS[name]
    try:
        planted = fault.store(verifier.artifacts, verifier.baseline, _libraries(verifier, fault))
        bench = Bench(host, planted, verifier.baseline, verifier.config, verifier.text, 20_011, LAYERS)
        checks = _checker(verifier, reference, name)(bench)
        host.call(Unload(planted.hash, LAYERS))
    except HostFailure as failure:
        return failure.code == "bad_output"
    return any(c.verdict is Verdict.FAIL and c.check == name for c in checks)


_QUALITY = ("distance from float32", "perplexity", "exactness")


def _checker(verifier: Verifier, reference: HostClient | None, name: str) -> Callable[[Bench], list[Check]]:
    if name in _QUALITY:
        assert reference is not None
        tolerance = "exact" if name == "exactness" else "near"
        return lambda bench: quality.judge(bench, reference, tolerance, scale=0.5)
    if name == "physical floor":
        # a few layers of a small model fit a cache: the baseline's own step stands in for the floor
        return lambda bench: integrity.floor(bench, bench.witness_s / FORCED)
    if name == "proof of application":
        return lambda bench: integrity.application(bench, verifier.artifacts)
    if name == "threads":
        return integrity.baseline_speed
    return (contamination.CHECKS | serving.CHECKS | experts.CHECKS | integrity.CHECKS)[name]


def _libraries(verifier: Verifier, fault: Fault) -> dict[str, Path]:
    if not fault.cpp:
        return {}
    out = verifier.artifacts.root.parent / "builds"
    out.mkdir(exist_ok=True)
    source = out / "unused.cpp"
    source.write_text(fault.cpp)
    built = compile_cpp(source, out_dir=out)
    return {"unused": built.path} if built.path else {}


@contextmanager
def _hosts(verifier: Verifier, reference: bool, even: bool) -> Iterator[tuple[HostClient, HostClient | None]]:
    with verifier.host(verifier.dtype, "controls", even) as host:
        if not reference:
            yield host, None
            return
        with verifier.host("float32", "controls") as other:
            yield host, other


def _key(verifier: Verifier) -> str:
    digest = hashlib.sha256(verifier.baseline.hash.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for path in sorted(verifier.model.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _read(path: Path) -> dict[str, dict[str, bool]]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _write(path: Path, data: dict[str, dict[str, bool]]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as out:
        json.dump(data, out, indent=1)
    os.replace(name, path)
