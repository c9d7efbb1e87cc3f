"""The main job in a terminal.

    python -m optimizer --model demo --traffic demo --budget 5m --out report.json [--data DIR] [--resume RUN]

Writes the report, prints it as a table. Exit status: 0 with a result (also when nothing beat the baseline), 1 with a
sentence when there is none, 130 when stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from optimizer.agents.llm.settings import UNPRICED, LlmSettings
from optimizer.builder import kinds_off
from optimizer.config import ConfigError, RunConfig
from optimizer.file_store import FileStore
from optimizer.library import claimed, new_run
from optimizer.objectives import OBJECTIVES
from optimizer.search import Search, SearchFailed
from optimizer.store import LeaseLost
from optimizer.terminal import Screen
from optimizer.traffic.profile import TrafficError
from optimizer.traffic.readers import TraceError
from optimizer.traffic.sources import load_traffic

STOPPED = 130


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    screen = Screen()
    try:
        _check_out(options.out)
        store = FileStore(Path(options.data))
        config = _resumed(store, options) if options.resume else _new(store, options)
        return _run(config, store, screen, Path(options.out))
    except (ConfigError, TrafficError, TraceError, SearchFailed) as error:
        screen.fail(str(error))
    except LeaseLost:
        screen.fail("Another worker took this run over. Its progress is in the run's folder.")
    except OSError as error:
        screen.fail(
            f"{error.filename or 'a file'}: {error.strerror}. Give a folder that can be written to with --data."
        )
    return 1


def _run(config: RunConfig, store: FileStore, screen: Screen, out: Path) -> int:
    lease = claimed(store, config.run_id)
    for sentence in kinds_off():
        screen.note(sentence)
    screen.note(f"Run {config.run_id}. To go on after an interruption: --resume {config.run_id}")
    _stop_on_signal(store, config.run_id, screen)
    with screen:
        report = Search(config, store, screen.on_event).run(lease)
    if report is None:
        screen.note("Stopped. What was measured is kept in the run's folder.")
        return STOPPED
    _write(out, report)
    screen.report(report)
    screen.note(f"Written to {out}")
    return 0


def _new(store: FileStore, options: argparse.Namespace) -> RunConfig:
    return new_run(
        store,
        options.model,
        load_traffic(options.traffic, options.concurrency, options.temperature, options.top_p),
        options.budget,
        name=options.name or f"{options.model} on {options.traffic}",
        dtype=options.dtype,
        threads=options.threads,
        tolerance=options.tolerance,
        seed=options.seed,
        price_per_hour=options.price_per_hour,
        objective=options.objective,
        first_tokens=options.first_tokens,
        slo={k: v for k, v in (("ttft_s", options.ttft), ("tpot_s", options.tpot)) if v},
        max_memory_bytes=round(options.max_memory_gb * 1e9),
        foci=tuple(f for f in options.foci.split(",") if f),
        llm=_llm(options),
    )


def _llm(options: argparse.Namespace) -> dict[str, Any]:
    """What the run keeps of its language model: everything but the key."""
    chosen = {"model": options.llm_model, "base_url": options.llm_base_url, "max_usd": options.llm_max_usd}
    settings = LlmSettings.read(os.environ, chosen)
    if settings is None:
        if options.llm_base_url or options.llm_max_usd:
            raise ConfigError("No language model is named: add --llm-model, or set POLYMORPH_LLM_MODEL.")
        return {}
    if options.llm_max_usd and not settings.priced:
        raise ConfigError(UNPRICED)
    return {name: getattr(settings, name) for name in ("model", "base_url", "max_usd", "max_tokens")}


def _resumed(store: FileStore, options: argparse.Namespace) -> RunConfig:
    try:
        return RunConfig.from_json(store.load(options.resume).config)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from error


def _stop_on_signal(store: FileStore, run_id: str, screen: Screen) -> None:
    """The first signal asks the run to stop at the next measurement; the second ends it at once."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        store.cancel(run_id)
        screen.note("Stopping after this measurement. Once more to stop at once.")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _check_out(out: str) -> None:
    folder = Path(out).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"The report cannot be written to {out}: there is no folder {folder} that can be written to.")
    if Path(out).is_dir():
        raise ConfigError(f"The report cannot be written to {out}: it is a folder. Name a file in it.")


def _write(out: Path, report: dict[str, Any]) -> None:
    staging = out.with_name(f".{out.name}.new")
    staging.write_text(json.dumps(report, indent=1))
    staging.replace(out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m optimizer", description="Makes an LLM endpoint faster.")
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder in Hugging Face layout, or a .gguf file")
    add(
        "--traffic",
        default="demo",
        help="a preset, a trace (Azure CSV, BurstGPT CSV, Mooncake JSONL) or a profile (.json)",
    )
    add("--budget", default="5m", help="for the whole job: 90s, 5m, 1.5h")
    add("--out", default="report.json", help="where the report is written")
    add("--data", default=os.environ.get("POLYMORPH_DATA", "data"), help="data folder")
    add("--resume", metavar="RUN", default="", help="goes on with a run that was interrupted")
    add("--name", default="", help="what the run is called")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=0, help="0: all cores")
    add("--concurrency", type=int, default=0, help="0: the traffic's own")
    add("--temperature", type=float, default=None, help="of every request; left out: the traffic's own")
    add("--top-p", type=float, default=None, help="of every request; left out: the traffic's own")
    add("--tolerance", default="near", help="exact, near or quantised")
    add("--foci", default="", help="attention,projections,cache,scheduling; empty: all")
    add("--seed", type=int, default=0)
    add("--objective", default="output_throughput", help=", ".join(OBJECTIVES))
    add("--first-tokens", type=int, default=16, help="N of the objective first_tokens (voice: the first spoken words)")
    add("--ttft", type=float, default=0.0, help="SLO: seconds to the first token; 0: no limit")
    add("--tpot", type=float, default=0.0, help="SLO: seconds for each further token; 0: no limit")
    add("--max-memory-gb", type=float, default=0.0, help="that a served version may keep resident; 0: no limit")
    add("--price-per-hour", type=float, default=0.0, help="of this machine, in USD: adds cost per million tokens")
    add("--llm-model", metavar="NAME", default="", help="asks this language model too; POLYMORPH_LLM_MODEL by default")
    add(
        "--llm-base-url", metavar="URL", default="", help="of its OpenAI-compatible API; its key: POLYMORPH_LLM_API_KEY"
    )
    add("--llm-max-usd", metavar="USD", type=float, default=0.0, help="that the model may cost in this run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
