"""One layer's mixture of experts, plain torch beside the C++ operator, by how its work is shared out and how routing is skewed.

The same rows go to every program in turn. With a planted skew nearly every token chooses the first expert, as real routers
do for a while; random routing stands beside it. Which way of sharing wins depends on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.baseline.experts import mixture
from engine.models.structure import Experts
from kernels.moe.reference import route
from tests.bench.figures import Figure
from tests.kernels import support

HIDDEN, FFN, THREADS = 512, 1024, 2
EXPERTS = Experts(count=8, per_token=1, intermediate_size=FFN, layers=(0,), normalise=True)
SPLITS = {0: "all threads at every expert", 1: "whole experts a thread", 2: "panels as threads become free"}
ROWS, REPEATS = (1, 8, 64, 512), 25
SKEWS = {"random routing": 0.0, "planted skew": 6.0}
Program = Callable[[Tensor], Tensor]


def run() -> list[Figure]:
    torch.set_num_threads(THREADS)
    with torch.inference_mode():
        return [figure for name, skew in SKEWS.items() for figure in _figures(name, skew)]


def _figures(name: str, skew: float) -> list[Figure]:
    weights = _weights(skew)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    def plain(x: Tensor) -> Tensor:
        return mixture(x, "0", EXPERTS, weights, linear)

    programs: dict[str, Program] = {"torch": plain}
    programs |= {what: _operator(weights, split) for split, what in SPLITS.items()}
    figures = []
    for rows in ROWS:
        seconds = _in_turns(programs, rows)
        share = _busiest(weights, rows)
        figures.append(Figure(f"{name}, {rows} rows: share of the busiest expert", share, ""))
        figures += [
            Figure(f"{name}, {rows} rows: torch's time over that of {what}", seconds["torch"] / seconds[what], "x")
            for what in SPLITS.values()
        ]
    return figures


def _weights(skew: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    router = random(EXPERTS.count, HIDDEN)
    router[0, 0] += skew  # every row's first element is 1
    weights = {"0.mlp.gate.weight": router}
    for expert in range(EXPERTS.count):
        for part, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            weights[f"0.mlp.experts.{expert}.{part}_proj.weight"] = random(*shape)
    return weights


def _operator(weights: dict[str, Tensor], split: int) -> Program:
    names = [[f"0.mlp.experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down")] for e in range(EXPERTS.count)]
    experts = [tuple(weights[name] for name in each) for each in names]
    made: Program = support.glue("moe").GroupedExperts(
        support.library("moe", {"PM_SPLIT": split}), weights["0.mlp.gate.weight"], experts, EXPERTS.per_token, True, 1.0, THREADS
    )  # fmt: skip
    return made


def _rows(rows: int, seed: int) -> Tensor:
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x[:, 0] = 1.0
    return x


def _busiest(weights: dict[str, Tensor], rows: int) -> float:
    _, ids = route(_rows(rows, 0).float() @ weights["0.mlp.gate.weight"].float().T, EXPERTS.per_token)
    return float(ids.flatten().bincount().max()) / ids.numel()


def _in_turns(programs: dict[str, Program], rows: int) -> dict[str, float]:
    """Median seconds of each, all of them on every drawn input, after checking that they agree on one."""
    x = _rows(rows, 0)
    for name, program in programs.items():
        torch.testing.assert_close(program(x), programs["torch"](x), rtol=5e-2, atol=5e-2, msg=name)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for seed in range(REPEATS):
        x = _rows(rows, seed)
        for name, program in programs.items():
            start = time.perf_counter()
            program(x)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
