"""Hot swap: source text to first measured step by kind of candidate, beside the server's own cold start.

Kinds: another setting, a Python source, a C++ source whose library is in the build cache, a C++ source never seen before.
While the server swaps, a stream begun before ends whole, and the host's pid and weight mapping stay.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from engine.artifacts import ArtifactStore
from engine.batching import SeqStep, make_batch
from engine.client import HostClient
from engine.wire import Load, Loaded, SampleRow, Step, Unload
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.records import Proposal
from tests import paths
from tests.bench.figures import Figure
from tests.serving import Server, serve

REPEATS = 5
GOALS = {"settings": 0.5, "python": 0.5, "cpp_cached": 0.5, "cpp_fresh": 3.0}


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        times = by_kind(data)
        server = _while_serving(data)
    figures = [
        Figure(f"source text to first measured step, {kind}", statistics.median(seconds), "s", GOALS[kind], "at most")
        for kind, seconds in times.items()
    ]
    return figures + server


def by_kind(data: Path) -> dict[str, list[float]]:
    builder = Builder(data)
    baseline = builder.artifacts.baseline().files()["forward.py"]
    cpp = _cpp_proposal()
    with HostClient(paths.demo_model()) as host:
        loaded = _first_step(host, builder, _proposal("baseline", {"forward.py": baseline}))  # warm: imports, allocator
        del loaded
        times: dict[str, list[float]] = {kind: [] for kind in GOALS}
        for i in range(REPEATS):
            times["settings"].append(
                _first_step(host, builder, _proposal(f"setting {i}", {"forward.py": baseline}, block_size=32, probe=i))
            )
            changed = {"forward.py": baseline.replace("class Forward:", f"VARIANT = {i}\n\n\nclass Forward:", 1)}
            times["python"].append(_first_step(host, builder, _proposal(f"python {i}", changed)))
            fresh = dict(cpp.files) | {n: f"{t}\n// variant {i}\n" for n, t in cpp.files.items() if n.endswith(".cpp")}
            times["cpp_fresh"].append(_first_step(host, builder, _proposal(f"fresh {i}", fresh, **cpp.settings)))
            again = fresh | {"forward.py": fresh["forward.py"] + f"\nVARIANT = {i}\n"}
            times["cpp_cached"].append(_first_step(host, builder, _proposal(f"cached {i}", again, **cpp.settings)))
    return times


def _cpp_proposal() -> Proposal:
    """The whole step as one C++ kernel, as the fusion agent writes it."""
    program = Program.of(["whole_step"])
    return Proposal(
        "cpp", "bench", "projections", "whole_step", "timing a swap", "cpp", program.files(), program.settings
    )


def _proposal(name: str, files: dict[str, str], **settings: Any) -> Proposal:
    mechanism = "cpp" if len(files) > 1 else "python"
    return Proposal(name, "bench", "projections", name, "timing a swap", mechanism, files, settings)


def _first_step(host: HostClient, builder: Builder, proposal: Proposal) -> float:
    """Seconds from source text to the end of the first step of a batch of four."""
    start = time.perf_counter()
    built = builder.build(proposal)
    assert not built.failure, built.failure
    artifact = built.artifact
    loaded = host.call(Load(artifact.hash, str(artifact.path), kv_bytes=64 << 20))
    assert isinstance(loaded, Loaded)
    steps = [SeqStep(i, [7 * i + 1], 0, [i]) for i in range(4)]
    host.call(Step(artifact.hash, make_batch(steps, loaded.block_size), [SampleRow(temperature=0)] * 4))
    seconds = time.perf_counter() - start
    host.call(Unload(artifact.hash))
    return seconds


def _while_serving(data: Path) -> list[Figure]:
    artifacts = ArtifactStore(data)
    baseline = artifacts.baseline()
    other = artifacts.put(baseline.files(), name="other", settings={"block_size": 32})
    arguments = ["--model", str(paths.demo_model()), "--name", "demo", "--artifact", str(baseline.path)]
    with serve("engine.api", arguments, data / "api.log") as server:
        before = httpx.get(f"{server.url}/internal/status").json()
        chunks: list[dict[str, Any]] = []
        stream = threading.Thread(target=_stream, args=(server, chunks))
        stream.start()
        while not chunks:
            time.sleep(0.005)
        body = {"artifact_hash": other.hash, "path": str(other.path), "version_id": "other", "generation": 1}
        swapped = httpx.post(f"{server.url}/internal/swap", json=body, timeout=60).json()
        stream.join()
        after = httpx.get(f"{server.url}/internal/status").json()
    tokens = chunks[-1]["usage"]["completion_tokens"]
    return [
        Figure("hot swap of a running server", swapped["hot_swap_s"], "s"),
        Figure("cold start of the same server", server.cold_start_s, "s"),
        Figure("cold start over hot swap", server.cold_start_s / swapped["hot_swap_s"], "x"),
        Figure("host pid unchanged", str(before["host_pid"] == after["host_pid"]), "", "True", "equal"),
        Figure(
            "weight mapping unchanged", str(before["weights_mapping"] == after["weights_mapping"]), "", "True", "equal"
        ),
        Figure(
            "serving another version after", str(before["artifact_hash"] != after["artifact_hash"]), "", "True", "equal"
        ),
        Figure("tokens of the stream begun before the swap", tokens, "tokens", STREAM_TOKENS, "equal"),
    ]


STREAM_TOKENS = 96


def _stream(server: Server, chunks: list[dict[str, Any]]) -> None:
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
