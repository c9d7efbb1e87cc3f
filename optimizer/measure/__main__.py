"""Measures any OpenAI-compatible server under an endpoint's traffic: what a customer serves today, or ours.

    python -m optimizer.measure http://host:8000 --model NAME --traffic demo --users 4
    python -m optimizer.measure http://host:8000 --model NAME --traffic trace.csv --rate 2 --chat --key-from MY_KEY

With `--tokenizer FOLDER` prompts are token ids of exactly the traffic's lengths; without it they are text of about those
lengths. Prints the figures and writes them with every sample to `--out`. Exit status 1 with a sentence when nothing was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from engine.models.errors import ModelError
from engine.models.resolve import resolve_model
from engine.models.tokenizer import Tokenizer
from optimizer.measure.http_stream import HttpError
from optimizer.measure.load import LoadRequest, Target, run_closed_loop, run_open_loop
from optimizer.measure.samples import LoadResult
from optimizer.terminal import Screen
from optimizer.traffic.profile import RequestShape, TrafficError, TrafficProfile
from optimizer.traffic.prompts import prompt_ids, prompt_text, source_ids
from optimizer.traffic.readers import TraceError
from optimizer.traffic.sources import load_traffic

TOKENS_PER_WORD = 1.4  # of the prompts' English and code, for the usual vocabularies
Write = Callable[[RequestShape, str, str], Sequence[int] | str]  # shape, seed, scope


class Nothing(Exception):
    """Nothing could be measured; the text is a sentence."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    screen = Screen()
    try:
        result = measure(options)
    except (Nothing, HttpError, TrafficError, TraceError, ModelError, ValueError) as problem:
        screen.fail(str(problem))
        return 1
    summary = result.summary()
    screen.console.print(_table(summary))
    for error in sorted({r.error for r in result.failed})[:5]:
        screen.note(f"failed: {error}")
    if options.out:
        samples = [r.to_json() for r in result.requests]
        Path(options.out).write_text(json.dumps({"url": options.url, "summary": summary, "samples": samples}, indent=1))
        screen.note(f"Written to {options.out}")
    return 0


def measure(options: argparse.Namespace) -> LoadResult:
    """Warms the server up with requests of their own, then measures. Raises what `main` tells as a sentence."""
    profile = load_traffic(options.traffic, options.users, options.temperature, options.top_p)
    if options.rate:
        profile = dataclasses.replace(profile, request_rate=options.rate)
    if options.chat and options.tokenizer:
        raise Nothing("A chat takes text: leave out --tokenizer, or leave out --chat to send token ids.")
    key = os.environ.get(options.key_from, "") if options.key_from else ""
    if options.key_from and not key:
        raise Nothing(f"The environment variable {options.key_from} is empty: put the API key there.")
    target = Target(options.url, options.model, "chat" if options.chat else "completions", key)
    write = _writer(options.tokenizer, Path(options.data))
    warmup = _requests(profile, profile.concurrency, write, "warmup")
    requests = _requests(profile, options.requests, write, "measured")
    if options.rate:
        result = run_open_loop(target, requests, warmup)
    else:
        result = run_closed_loop(target, requests, profile.concurrency, warmup)
    if not result.done:
        raise Nothing(f"Every request failed: {result.failed[0].error}")
    return result


def _requests(profile: TrafficProfile, count: int, write: Write, scope: str) -> list[LoadRequest]:
    shapes = profile.sample(count, 0, "heldout" if scope == "measured" else "search")
    return [LoadRequest(write(s, f"{scope} {i}", scope), s.osl, s.at, s.sampling()) for i, s in enumerate(shapes)]


def _writer(tokenizer: str, data: Path) -> Write:
    if not tokenizer:
        return lambda shape, seed, scope: prompt_text(shape, seed, TOKENS_PER_WORD, scope)
    source = source_ids(Tokenizer(resolve_model(tokenizer, data)).encode)
    return lambda shape, seed, scope: prompt_ids(shape, seed, source, scope)


def _table(summary: dict[str, Any]) -> Table:
    table = Table("", "median", "p95", "p99", title=f"{summary['requests']} requests, {summary['failed']} failed")
    for name, title, scale in (("ttft", "TTFT (ms)", 1e3), ("tpot", "TPOT (ms)", 1e3), ("e2el", "end to end (s)", 1.0)):
        values = [summary[f"{level}_{name}"] for level in ("median", "p95", "p99")]
        table.add_row(title, *("-" if v is None else f"{v * scale:.4g}" for v in values))
    table.caption = (
        f"{summary['output_tput']:.1f} output tok/s, {summary['total_tput']:.1f} tok/s in all; "
        f"{summary['isl']} tokens in and {summary['osl']} out on average"
    )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optimizer.measure",
        description="Measures any OpenAI-compatible server under an endpoint's traffic.",
    )
    add = parser.add_argument
    add("url", help="with or without /v1")
    add("--model", required=True, help="the name that the server knows it by")
    add("--traffic", default="demo", help="a preset, a trace or a profile (.json)")
    add("--users", type=int, default=0, help="of a closed loop; 0: the traffic's own")
    add("--rate", type=float, default=0.0, help="requests a second of an open loop; 0: a closed loop")
    add("--temperature", type=float, default=None, help="of every request; left out: the traffic's own")
    add("--top-p", type=float, default=None, help="of every request; left out: the traffic's own")
    add("--requests", type=int, default=32)
    add("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    add("--tokenizer", default="", help="demo, a model folder or a .gguf: prompts of exact length, as token ids")
    add("--key-from", metavar="VARIABLE", default="", help="the environment variable that holds the API key")
    add("--data", default=os.environ.get("POLYMORPH_DATA", "data"), help="data folder")
    add("--out", default="", help="where figures and samples are written as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
