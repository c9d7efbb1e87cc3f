"""`make bench` or `make bench NAME=swap`: runs benchmarks one after another. Figures, never a pass or fail."""

from __future__ import annotations

import importlib
import sys

from tests.bench import figures

BENCHMARKS = ("swap", "recovery", "main_job", "peers", "experts", "cost_model", "search", "landscape")


def main(names: list[str]) -> int:
    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        path = figures.write(name, importlib.import_module(f"tests.bench.{name}").run())
        print(f"written to {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
