"""Checks the Triton operators on whatever GPU is here: values, bandwidth, decode of a Llama-1B shape, the swap.

    python -m kernels.device_check --out device_check.json

Needs nothing but this repository, torch and triton. Writes JSON after each part, so that a run that is cut off loses nothing,
and starts no part after its time limit. Exits 0 without a GPU ("no device"), 1 when a part failed or a value is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIME_LIMIT_S = 300.0


@dataclass
class Report:
    """What was found so far; `write` puts it on disk after every part."""

    out: Path
    limit_s: float
    start: float = field(default_factory=time.perf_counter)
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def part(self, name: str, run: Callable[[], Any], judge: Callable[[Any], list[str]]) -> None:
        """Runs a part, unless time is up, and notes what `judge` says is wrong with its result."""
        start = time.perf_counter()
        if start - self.start > self.limit_s:
            self.found[name] = {"skipped": f"after {self.limit_s:g} s"}
            self.problems.append(f"{name}: skipped, out of time")
        else:
            try:
                result = run()
                self.found[name] = {"seconds": time.perf_counter() - start, "result": result}
                self.problems += [f"{name}: {problem}" for problem in judge(result)]
            except Exception as error:  # one part's failure must not hide what the others find
                self.found[name] = {"error": str(error), "trace": traceback.format_exc()[-4000:]}
                self.problems.append(f"{name}: {type(error).__name__}: {error}")
        self.write()

    def write(self) -> None:
        whole = {**self.found, "problems": self.problems, "total_s": time.perf_counter() - self.start}
        self.out.write_text(json.dumps(whole, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds after which no part is started")
    options = parser.parse_args()
    report = Report(options.out, options.time_limit)
    import torch

    if not torch.cuda.is_available():
        report.found["device"] = None
        report.write()
        print("no device")
        return 0
    check(report, torch.device("cuda", torch.cuda.current_device()))
    print(json.dumps(report.found, indent=1))
    print("\n".join(report.problems) or "all checks passed")
    return 1 if report.problems else 0


def check(report: Report, device: Any, shapes: Any = None) -> None:
    """All parts on `device`; `shapes` is a `check_values.Shapes` (default: Llama-1B's)."""
    import torch

    from kernels.gpu import check_speed, check_values
    from kernels.gpu.tunables import CAPABILITY

    shapes = shapes or check_values.LLAMA_1B
    gpu = device.type == "cuda"
    batches, repeats = ((1, 8, 32), 20) if gpu else ((2,), 1)
    report.found["device"] = describe(device)
    with torch.inference_mode():
        report.part("values", check_values.Values(shapes, device).run, judge_values)
        report.part("bandwidth", lambda: check_speed.bandwidth(shapes, device, repeats, max(batches)), lambda _: [])
        checkpoint = check_speed.Checkpoint(shapes, device)
        report.part("decode", lambda: check_speed.decode(checkpoint, "same", batches, repeats), judge_decode)
        report.part("swap", lambda: check_speed.swap(checkpoint), judge_swap)
        if not gpu or torch.cuda.get_device_capability(device) >= CAPABILITY["fp8"]:
            report.part("fp8", lambda: check_speed.decode(checkpoint, "fp8", batches, repeats), judge_decode)


def describe(device: Any) -> dict[str, Any]:
    import torch
    import triton

    about = {"kind": device.type, "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"name": properties.name, "memory": properties.total_memory}
        about |= {
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return about


def judge_values(errors: dict[str, float]) -> list[str]:
    from kernels.gpu.check_values import LIMIT

    return [f"{name} is off by {value:.3g} of the largest value" for name, value in errors.items() if value > LIMIT]


def judge_decode(rows: dict[str, dict[str, Any]]) -> list[str]:
    from kernels.gpu.check_speed import STEP_LIMIT

    wrong = [f"{name}: logits are not finite" for name, row in rows.items() if not row["finite"]]
    far = [(name, row.get("graph_error", 0.0)) for name, row in rows.items()]
    return wrong + [f"{name}: the graph's logits are off by {e:.3g}" for name, e in far if e > STEP_LIMIT]


def judge_swap(found: dict[str, Any]) -> list[str]:
    from kernels.gpu.check_speed import STEP_LIMIT

    wrong = [f"{name} is not so" for name in ("same_after", "weights_stayed") if not found[name]]
    if found["error_between"] > STEP_LIMIT:
        wrong.append(f"the variants' logits lie {found['error_between']:.3g} apart")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
