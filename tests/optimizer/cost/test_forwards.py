"""Whole forwards: planted programs are found again, and an estimate never calls itself more than it is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.models.config import ModelConfig
from optimizer.cost.forwards import TERMS, Forward, ForwardModel
from optimizer.cost.roofline import Ceilings
from optimizer.records import Provenance

CEILINGS = Ceilings(read=1e9, copy=1e9, gemm=1e10, measured=True)
SHAPES = [Forward(b, 0, b * c) for b in (1, 2, 4, 8, 16, 24) for c in (16, 256, 1024, 2048)] + [
    Forward(0, n, n * (n + 1) // 2 + n * past) for n in (16, 64, 256) for past in (0, 512)
]
CORNERS = [Forward(1, 0, 16), Forward(24, 0, 24 * 2048), Forward(0, 16, 136), SHAPES[-1], Forward(8, 0, 2048)]
PLAIN = np.array([2.0, 1.5, 9.0, 6.0, 0.5, 0.3, 0.5, 0.5, 20.0])
QUICK = np.array([1.1, 1.1, 2.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.5])


@pytest.fixture
def model(tiny_config: ModelConfig) -> ForwardModel:
    return ForwardModel(tiny_config, "bfloat16", CEILINGS)


def teach(model: ForwardModel, program: str, truth: np.ndarray, shapes: list[Forward], noise: float = 0.03) -> None:
    off = random.Random(program)
    for shape in shapes:
        model.learn(program, shape, float(model.terms(shape) @ truth) * off.lognormvariate(0, noise))


def errors(model: ForwardModel, program: str, truth: np.ndarray, shapes: list[Forward]) -> list[float]:
    return [abs(model.predict(program, s).seconds / float(model.terms(s) @ truth) - 1) for s in shapes]


def test_what_was_measured_is_given_back(model: ForwardModel) -> None:
    for seconds in (0.3, 0.2, 0.4):
        model.learn("a", SHAPES[0], seconds)
    found = model.predict("a", SHAPES[0])
    assert (found.seconds, found.low, found.high, found.provenance) == (0.3, 0.2, 0.4, Provenance.MEASURED)


def test_a_program_that_nothing_is_known_of_has_its_roofline_and_no_upper_end(model: ForwardModel) -> None:
    teach(model, "other", PLAIN, SHAPES)
    found = model.predict("a", SHAPES[3])
    assert found.provenance is Provenance.ROOFLINE and found.seconds == found.low == model.floor_s(SHAPES[3])
    assert found.high == np.inf and "0 forwards" in found.reasons[0]
    blind = ForwardModel(model.config, "bfloat16", Ceilings(1e9, 1e9, 1e10, measured=False))
    assert blind.predict("a", SHAPES[3]).provenance is Provenance.UNVALIDATED


def test_the_floor_is_worked_out_by_hand(model: ForwardModel) -> None:
    # tests/optimizer/cost/test_roofline.py: 73,728 numbers in matrices, 32,768 in the head, 128 numbers a token kept
    assert model.floor_s(Forward(2, 0, 200)) == pytest.approx(2 * (73_728 + 32_768) / 1e9 + 200 * 128 * 2 / 1e9)
    prompt = (2 * 256 * 73_728 + 2 * 32_768) / 1e10 + 256 * 257 / 2 * 4 * 64 * 2 / 1e10
    assert model.floor_s(Forward(0, 256, 256 * 257 // 2)) == pytest.approx(prompt)


def test_shapes_that_were_left_out_are_fitted(model: ForwardModel) -> None:
    left_out = SHAPES[5:18:4]
    teach(model, "a", PLAIN, [s for s in SHAPES if s not in left_out])
    assert max(errors(model, "a", PLAIN, left_out)) < 0.1
    found = model.predict("a", left_out[0])
    assert found.provenance is Provenance.FITTED and found.low < found.seconds < found.high and found.reasons == ()


def test_a_few_forwards_place_a_program_beside_the_one_that_is_like_it(model: ForwardModel) -> None:
    left_out = [s for s in SHAPES if s not in CORNERS]
    teach(model, "quick's twin", QUICK * 1.1, CORNERS, noise=0.0)
    alone = np.median(errors(model, "quick's twin", QUICK * 1.1, left_out))
    teach(model, "plain", PLAIN, SHAPES)
    teach(model, "quick", QUICK, SHAPES)
    beside = np.median(errors(model, "quick's twin", QUICK * 1.1, left_out))
    assert beside < 0.05 and beside < alone
    assert model.predict("quick's twin", left_out[0]).provenance is Provenance.FITTED


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (Forward(64, 0, 64 * 256), "batch: 64 is outside 0 to 24"),
        (Forward(0, 512, 512 * 300), "prefill tokens: 512 is outside 0 to 256"),
        (Forward(1, 0, 4_000_000), "kv tokens: 4000000"),
    ],
)
def test_outside_of_what_was_measured_it_says_so_and_is_less_sure(
    model: ForwardModel, forward: Forward, named: str
) -> None:
    teach(model, "a", PLAIN, SHAPES[1:])
    inside, found = model.predict("a", SHAPES[0].__class__(3, 0, 900)), model.predict("a", forward)
    assert inside.provenance is Provenance.FITTED
    assert found.provenance is Provenance.EXTRAPOLATED and any(named in r for r in found.reasons)
    assert found.high / found.seconds > 1.9 * (inside.high / inside.seconds - 1) + 1


def test_intervals_hold_about_four_of_five(model: ForwardModel) -> None:
    left_out = SHAPES[2::3]
    teach(model, "a", PLAIN, [s for s in SHAPES if s not in left_out], noise=0.1)
    off, inside = random.Random(9), []
    for shape in left_out * 20:
        found, measured = model.predict("a", shape), float(model.terms(shape) @ PLAIN) * off.lognormvariate(0, 0.1)
        inside.append(found.low <= measured <= found.high)
    assert 0.7 < np.mean(inside) < 0.97


def test_a_later_measurement_changes_later_estimates(model: ForwardModel) -> None:
    teach(model, "a", PLAIN, SHAPES[1:])
    before = model.predict("a", SHAPES[0]).seconds
    teach(model, "a", PLAIN * 3, SHAPES[1:])
    teach(model, "a", PLAIN * 3, SHAPES[1:])
    assert model.predict("a", SHAPES[0]).seconds > 2 * before


@pytest.mark.parametrize("numbers", [(0, 0, 0), (-1, 4, 4), (2, 0, 1)])
def test_what_is_no_forward_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is no forward"):
        Forward(*numbers)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(model: ForwardModel, seconds: float) -> None:
    with pytest.raises(ValueError, match="no measured time"):
        model.learn("a", SHAPES[0], seconds)


def test_terms_have_names(model: ForwardModel) -> None:
    assert len(model.terms(SHAPES[0])) == len(TERMS)
