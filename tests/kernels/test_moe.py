"""The mixture of experts: any number of experts and rows, skewed routing, rows independent of their company."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.moe import reference
from tests.kernels import support
from tests.kernels.contract import KernelContract


@dataclass(frozen=True)
class Case:
    x: Tensor
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    per_token: int
    normalise: bool = True
    scale: float = 1.0
    routed: tuple[Tensor, Tensor] | None = None  # shares and expert numbers that the caller chose


def case(rows: int, hidden: int, ffn: int, experts: int, per_token: int, skew: float = 0.0, **fields: Any) -> Case:
    """`skew` is added to the first expert's score: at 5 nearly every token goes there."""
    g = torch.Generator().manual_seed(rows * 7919 + hidden * 31 + ffn + experts)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).bfloat16()

    x = torch.randn(rows, hidden, generator=g).bfloat16()
    x[:, 0] = 1.0  # whose weight is then a bias of the router
    router = random(experts, hidden) * 2
    router[0, 0] += skew
    gate, up, down = (random(experts, *shape) for shape in ((ffn, hidden), (ffn, hidden), (hidden, ffn)))
    return Case(x, router, gate, up, down, per_token, **fields)


def given(rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.rand(rows, 3, generator=g), torch.rand(rows, 7, generator=g).topk(3).indices


class TestMoe(KernelContract):
    op = "moe"
    cases = {
        **{f"{rows} rows": case(rows, 64, 48, 8, 2) for rows in (1, 2, 3, 7, 16, 17)},
        "one expert": case(5, 32, 16, 1, 1),
        "all experts": case(5, 32, 16, 4, 4),
        "an odd number of experts": case(23, 96, 40, 13, 3, normalise=False),
        "many small experts": case(33, 48, 18, 130, 8),
        "odd widths": case(21, 70, 94, 6, 2, scale=1.5),
        "skewed": case(70, 80, 130, 8, 2, skew=8.0),
        "the caller's choice": case(9, 64, 32, 7, 3, routed=given(9)),
    }
    mixed = "skewed"

    def run(self, library: ctypes.CDLL, case: Any, threads: int, block_size: int = 32) -> list[Tensor]:
        return [self.layer(library, case, threads)(case.x, *(case.routed or ()))]

    def layer(self, library: ctypes.CDLL, c: Case, threads: int) -> Any:
        experts = list(zip(c.gate, c.up, c.down, strict=True))
        return support.glue(self.op).GroupedExperts(
            library, c.router, experts, c.per_token, c.normalise, c.scale, threads
        )

    def expected(self, case: Any, values: Mapping[str, int] = {}) -> list[Tensor]:
        logits = case.x.float() @ case.router.float().T
        shares, ids = case.routed or reference.route(logits, case.per_token, case.normalise)
        return [reference.experts_mlp(case.x, case.gate, case.up, case.down, shares * case.scale, ids)]

    @pytest.mark.parametrize("split", [0, 1, 2])
    @pytest.mark.parametrize("emulated", [False, True], ids=["vectors", "tiles"])
    def test_a_row_does_not_depend_on_its_company(self, split: int, emulated: bool) -> None:
        define = {"PM_AMX_EMULATE": 1} if emulated else {}
        layer = self.layer(support.library(self.op, {"PM_SPLIT": split}, **define), self.cases[self.mixed], 2)
        x = self.cases[self.mixed].x
        whole = layer(x)
        for rows in (1, 2, 7, 8, 9, 33):
            assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x.flip(0)), whole.flip(0))

    def test_the_skewed_case_is_skewed(self) -> None:
        c = self.cases["skewed"]
        _, ids = reference.route(c.x.float() @ c.router.float().T, c.per_token)
        assert int((ids == 0).sum()) == len(c.x) > 3 * int(ids.flatten().bincount(minlength=8)[1:].max()) // 2

    def test_of_equal_scores_the_lower_number_is_chosen(self) -> None:
        """So that with even routing every row goes to the same experts."""
        c = self.cases["16 rows"]
        even = Case(c.x, torch.zeros_like(c.router), c.gate, c.up, c.down, 2)
        first = torch.tensor([[0, 1]]).expand(16, 2), torch.full((16, 2), 0.5)
        want = reference.experts_mlp(c.x, c.gate, c.up, c.down, first[1], first[0])
        self.close(self.run(support.library(self.op), even, 2)[0], want)

    def test_other_dtypes_and_shapes_are_refused_by_name(self) -> None:
        library, c = support.library(self.op), self.cases["1 rows"]
        with pytest.raises(ValueError, match="bfloat16 weights of an even width"):
            self.layer(library, Case(c.x, c.router.float(), c.gate, c.up, c.down, 2), 1)
        with pytest.raises(ValueError, match=r"bfloat16 \[T, 64\]"):
            self.layer(library, c, 1)(c.x.float())
