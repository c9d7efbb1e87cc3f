"""Our programs beside the engines people would otherwise pick, on the demo model: same prompts, in turns, in one run.

Each side runs in a process of its own, so that no runtime's threads disturb another's, and sides take turns: ours runs beside
each peer, and in the other order every second round. `POLYMORPH_PEERS` is the folder that `peers/setup.sh` filled (default
build/peers); an engine that is not there is shown as missing and never counts as beaten.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from optimizer.measure.servers import ServerSpec, api_server
from tests.bench import ours, vllm_server
from tests.bench.figures import Figure
from tests.paths import ROOT, SHARED

PEERS = Path(os.environ.get("POLYMORPH_PEERS", ROOT / "build" / "peers"))
SCRIPTS = SHARED / "peers"
PROMPT, NEW, THREADS, ROUNDS = 512, 64, 2, 1
LENGTHS = (16, 64, 256, 1024)
CODED = "whole_step (PM_WEIGHT_BITS=12)"  # bf16 weights in 12 bits, none of them changed
INT8 = "whole_step (PM_PREFETCH=2048, PM_WEIGHT_BITS=8)"  # fetching ahead is what a search finds here: 1.13x to 1.22x
PYTHONS = {"openvino": "openvino", "llamacpp": "llamacpp", "hf": "openvino"}
TIME_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Contest:
    """One kind of work. `peers` are names that peers/measure.py knows; `goals` by rate: (metric, least ratio)."""

    title: str
    program: str
    peers: tuple[str, ...]
    goals: Mapping[str, float]
    batch: int = 1
    new: int = NEW
    repeats: int = 7
    rounds: int = ROUNDS


CONTESTS = (
    Contest("bf16, batch 1", CODED, ("openvino-bf16", "llamacpp-bf16", "hf", "hf-compile"), {"decode": 1.6, "prefill": 1.4}),
    Contest("bf16, batch 8", "whole_step", ("openvino-bf16", "hf"), {"decode": 1.6, "prefill": 1.4}, batch=8, repeats=4),
    Contest("int8 weights, batch 1", INT8, ("llamacpp-q8_0", "openvino-int8"), {"decode": 1.6}),
    *(
        Contest(f"bf16, batch 1, {new} new tokens", CODED, ("openvino-bf16", "llamacpp-bf16"), {"decode": 1.0}, new=new,
                repeats=3 if new > 256 else 5, rounds=1)
        for new in LENGTHS if new != NEW
    ),
)  # fmt: skip


def run() -> list[Figure]:
    figures = [Figure("versions", versions(), "")]
    with tempfile.TemporaryDirectory() as folder:
        for contest in CONTESTS:
            figures += of_contest(contest, Path(folder))
        figures += serving(Path(folder)) + large(Path(folder))
    return figures


def versions() -> str:
    """What is compared, from each environment's own package list."""
    found = []
    wanted = {
        "openvino": ("openvino", "optimum-intel", "transformers", "torch"),
        "llamacpp": ("llama_cpp_python",),
        "vllm": ("vllm",),
    }
    for folder, packages in wanted.items():
        script = "import sys; from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in sys.argv[1:]), sep=', ')"
        found.append(text_of([str(python(folder)), "-c", script, *packages]) or f"{folder} missing")
    return "; ".join(found)


def python(folder: str) -> Path:
    return PEERS / folder / "bin" / "python"


def text_of(command: list[str], **more: Any) -> str | None:
    """The last line a command printed, or None when it is not there or failed; what it complained of is shown."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False, **more)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {type(error).__name__}", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{' '.join(command[:4])} failed: {done.stderr[-400:]}", file=sys.stderr)
        return None
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else None


def peer_rates(engine: str, contest: Contest) -> dict[str, float] | None:
    program = str(python(PYTHONS[engine.split("-")[0]]))
    line = text_of([program, str(SCRIPTS / "measure.py"), engine, str(PEERS), *shape_of(contest)])
    found = json.loads(line) if line else None
    return found and {"prefill": found["prefill_tok_s"], "decode": found["decode_tok_s"]}


def our_rates(contest: Contest, data: Path) -> dict[str, float] | None:
    command = [sys.executable, "-m", "tests.bench.ours", contest.program, str(PEERS), "--data", str(data)]
    line = text_of([*command, *shape_of(contest)], cwd=ROOT)
    return json.loads(line) if line else None


def shape_of(contest: Contest) -> list[str]:
    """The options that both sides understand."""
    sizes = {
        "prompt": PROMPT,
        "new": contest.new,
        "batch": contest.batch,
        "threads": THREADS,
        "repeats": contest.repeats,
    }
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


def of_contest(contest: Contest, data: Path) -> list[Figure]:
    sides: dict[str, Callable[[], dict[str, float] | None]] = {
        p: lambda p=p: peer_rates(p, contest) for p in contest.peers
    }
    sides["ours"] = lambda: our_rates(contest, data)
    print(f"{contest.title}", flush=True)
    found = in_turns(sides, contest.rounds)
    figures = []
    for rate in ("decode", "prefill"):
        medians = {name: statistics.median(r[rate] for r in rates) for name, rates in found.items() if rates}
        for name in sides:
            label = contest.program if name == "ours" else name
            figures.append(Figure(f"{contest.title}: {rate}, {label}", medians.get(name, "missing"), "tok/s"))
        if rate in contest.goals:
            figures.append(over_best(f"{contest.title}: {rate}", medians, contest.goals[rate]))
    return figures


def in_turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Every side's results, ours beside each peer in turn and the order turned round each time."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    peers = [name for name in sides if name != "ours"]
    order = [name for peer in peers for name in (peer, "ours")] or ["ours"]
    for turn in range(rounds):
        for name in order if turn % 2 == 0 else reversed(order):
            result = sides[name]()
            print(f"{name}: {result or 'missing'}", flush=True)
            if result is not None:
                found[name].append(result)
    return found


def over_best(title: str, medians: Mapping[str, float], goal: float) -> Figure:
    peers = {name: value for name, value in medians.items() if name != "ours"}
    if not peers or "ours" not in medians:
        return Figure(f"{title}, ours over the best peer", None, "x", goal)
    best = max(peers, key=lambda name: peers[name])
    return Figure(f"{title}, ours over {best}", medians["ours"] / peers[best], "x", goal)


def serving(data: Path) -> list[Figure]:
    """Output tok/s and TTFT over HTTP, eight users, beside vLLM's server."""
    model = PEERS / "smol"
    if not model.exists():
        return [Figure("serving, ours over vllm", None, "x", 2.0)]
    spec = ServerSpec(model, threads=THREADS, name="smol")
    found: dict[str, list[dict[str, float]]] = {"vllm": [], "ours": [], "ours int8": []}
    for _ in range(ROUNDS):
        with vllm_server.started(PEERS) as url:
            found["vllm"] += load(url)
        for side, program in (("ours", "whole_step"), ("ours int8", INT8)):
            with api_server(spec, ours.artifact(program, data).path, "ours", data / "logs") as server:
                found[side] += load(server.url)
    figures, medians = [], {}
    for name, results in found.items():
        for metric, unit in (("output_tput", "tok/s"), ("p95_ttft", "s"), ("median_tpot", "s")):
            value = statistics.median(r[metric] for r in results) if results else "missing"
            medians[name, metric] = value
            figures.append(Figure(f"serving 512/64, 8 users, {name}: {metric}", value, unit))
    if not found["vllm"]:
        return [*figures, Figure("serving, ours over vllm", None, "x", 2.0)]
    over = {m: medians["ours", m] / medians["vllm", m] for m in ("output_tput", "p95_ttft")}
    return [
        *figures,
        Figure("serving, ours over vllm: output", over["output_tput"], "x", 2.0),
        Figure("serving, ours over vllm: p95 TTFT", over["p95_ttft"], "x", 1.0, "at most"),
    ]


def load(url: str | None) -> list[dict[str, float]]:
    """One load of peers/serving.py against a server, or nothing when there is none."""
    if url is None:
        return []
    httpx.get(f"{url}/v1/models", timeout=30).raise_for_status()
    line = text_of([sys.executable, str(SCRIPTS / "serving.py"), url, "smol", str(PEERS)])
    return [json.loads(line)] if line else []


def large(data: Path) -> list[Figure]:
    """Weight bytes a second of a batch-1 decode step of a 1B Llama shape, over what plain reading reaches in the same seconds."""
    command = [
        sys.executable,
        "-m",
        "tests.bench.ours",
        "whole_step",
        "1b",
        "--data",
        str(data),
        "--threads",
        str(THREADS),
    ]
    line = text_of(command, cwd=ROOT)
    found = json.loads(line) if line else {}
    return [
        Figure("1B shape, random weights, bf16, batch 1: decode", found.get("decode"), "tok/s"),
        Figure("1B shape, decode: weight bytes read", found.get("gbs"), "GB/s"),
        Figure("1B shape: plain reading, in turns with it", found.get("read_gbs"), "GB/s"),
        Figure("1B shape, decode: share of plain reading", found.get("share"), "", 0.95),
    ]
