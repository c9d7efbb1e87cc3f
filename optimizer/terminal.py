"""A run in a terminal: one bar for the budget, one line for each result. Plain lines when the output is not a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

WORDS = {
    "profile": "profiling",
    "search": "searching",
    "verify": "verifying",
    "measure": "measuring",
    "report": "reporting",
}
STYLES = {"keep": "green", "marginal": "yellow", "retest": "yellow", "discard": "dim", "failed": "red"}


class Screen:
    """`on_event` takes the search's events. Use as a context while a run is on."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.errors = Console(stderr=True, highlight=False)
        self.bars = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[counts]}", style="dim"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.job = self.bars.add_task("starting", total=1.0, left="", counts="")
        self.pairs: Any = None

    def __enter__(self) -> Screen:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def on_event(self, kind: str, payload: dict[str, Any]) -> None:
        handler = getattr(self, f"_{kind}", None)
        if handler is not None:
            handler(payload)

    def note(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def fail(self, text: str) -> None:
        self.errors.print(Text(f"polymorph: {text}", style="red"), soft_wrap=True)

    def report(self, report: dict[str, Any]) -> None:
        from optimizer.report import print_report

        print_report(report, self.console)

    def _phase(self, p: dict[str, Any]) -> None:
        self.bars.update(self.job, description=WORDS.get(p["phase"], p["phase"]))
        self.console.print(Text(p["message"], style="bold"), soft_wrap=True)

    def _progress(self, p: dict[str, Any]) -> None:
        counts, best = p["counts"], p["best_ratio"]
        left = f"{p['elapsed_s']:.0f} of {p['budget_s']:.0f} s, {p['eta_low_s']:.0f} to {p['eta_high_s']:.0f} s left"
        done = (
            f"{counts['tier1']} measured, {counts['tier2']} on all layers, {counts['failed']} failed, best {best:.2f}x"
        )
        done += f", engines busy {p['utilisation']:.0%}"
        self.bars.update(
            self.job, total=p["budget_s"], completed=min(p["elapsed_s"], p["budget_s"]), left=left, counts=done
        )

    def _experiment(self, p: dict[str, Any]) -> None:
        style = STYLES.get(p["state"], "")
        name = f"{p['name']} ({p['focus']}, {p['mechanism']})"
        if p["state"] == "failed":
            text = f"  tier {p['tier']}  failed        {name}: {p['failure'].splitlines()[0][:160]}"
        elif p["ratio"] is None:
            text = f"          predicted {p['predicted']:.2f}x only: {name}"
        else:
            text = f"  tier {p['tier']}  {p['ratio']:.2f}x ({p['ci_low']:.2f} to {p['ci_high']:.2f}) {p['state']:<8} {name}"
        self.console.print(Text(text, style=style), soft_wrap=True)

    def _incumbent(self, p: dict[str, Any]) -> None:
        self.console.print(Text(f"  best so far: {p['name']} at {p['ratio']:.2f}x", style="bold green"), soft_wrap=True)

    def _log(self, p: dict[str, Any]) -> None:
        self.console.print(Text(f"  {p['text']}", style="yellow" if p["level"] != "info" else "dim"), soft_wrap=True)

    def _check(self, p: dict[str, Any]) -> None:
        if p["verdict"] != "pass":
            text = f"  {p['verdict']}: {p['check']}, {p['case']}: {p['value']} (limit {p['limit']} {p['unit']}) {p['detail']}"
            self.console.print(Text(text, style="red"), soft_wrap=True)

    def _end_to_end(self, p: dict[str, Any]) -> None:
        label = f"  {p['scenario']}"
        if self.pairs is None:
            self.pairs = self.bars.add_task(label, total=p["of"], left="", counts="")
        self.bars.update(
            self.pairs,
            description=label,
            total=p["of"],
            completed=p["pair"],
            left=f"pair {p['pair']}: {p['ratio']:.2f}x",
        )
