"""The cost model: a bound it never exceeds, corrections by what was measured, and provenance that says which."""

from __future__ import annotations

import pytest

from optimizer.cost.fitted import CostModel
from optimizer.cost.roofline import Workload
from optimizer.records import Experiment, State

OPERATORS = {
    "decode": {"projections": 6.0, "attention": 3.0, "cache": 1.0},
    "prefill": {"projections": 6.0, "attention": 3.0, "cache": 1.0},
}
FLOORS = {
    "decode": {"projections": 2.0, "attention": 1.0, "cache": 1.0},
    "prefill": {"projections": 2.0, "attention": 1.0, "cache": 1.0},
}
WORK = Workload(1, isl=10, osl=10, prefill_tokens=10, step_s={"decode": 10.0, "prefill": 10.0}, operators=OPERATORS)


@pytest.fixture
def model() -> CostModel:
    return CostModel(WORK, FLOORS)


def measured(ratio: float, state: State = State.KEEP) -> Experiment:
    return Experiment("e", "a", 1, state, "b", True, ratio, ratio - 0.1, ratio + 0.1)


def test_the_bound_is_all_operators_at_their_floor(model: CostModel) -> None:
    # ten decode steps and one prefill step, ten seconds each; four fit what is left of a step
    assert model.bound(("projections", "attention", "cache")) == pytest.approx(10 / 4)
    assert model.bound(("attention",)) == pytest.approx(10 / 8)
    assert model.bound(("attention",), covers=0.5) == pytest.approx(10 / 9)
    assert model.bound(()) == 1.0
    assert model.bound(("cache",)) == 1.0, "it is at its floor already"


def test_an_operator_faster_than_its_floor_promises_nothing_less() -> None:
    quick = CostModel(WORK, {phase: dict.fromkeys(parts, 9.0) for phase, parts in FLOORS.items()})
    assert quick.bound(("projections", "attention")) == 1.0


def test_a_first_prediction_is_the_rooflines_and_says_so(model: CostModel) -> None:
    found = model.predict("h", "attention", "python")
    assert found.artifact_hash == "h" and found.provenance == "roofline"
    assert found.ratio == pytest.approx(model.bound(("attention", "cache"), 0.25))
    assert found.low < found.ratio < found.high <= found.detail["bound"] == pytest.approx(2.5)
    assert found.detail["seen"] == 0


def test_without_measured_ceilings_a_prediction_is_unvalidated(model: CostModel) -> None:
    blind = CostModel(WORK, FLOORS, measured_ceilings=False)
    assert blind.predict("h", "attention", "python").provenance == "unvalidated"
    blind.learn("attention", "python", measured(1.1))
    assert blind.predict("h", "attention", "python").provenance == "unvalidated", "one measurement fits nothing"
    blind.learn("attention", "python", measured(1.1))
    assert blind.predict("h", "attention", "python").provenance == "fitted"


def test_what_reaches_every_operator_promises_more(model: CostModel) -> None:
    alone = model.predict("h", "attention", "python")
    assert model.predict("h", "attention", "python", combines=True).ratio > alone.ratio
    assert model.predict("h", "attention", "cpp").ratio > alone.ratio
    assert model.predict("h", "scheduling", "settings").ratio == 1.0


def test_it_learns_what_was_measured(model: CostModel) -> None:
    before = model.predict("h", "attention", "python")
    for _ in range(6):
        model.learn("attention", "python", measured(0.8))
    after = model.predict("h", "attention", "python")
    assert after.provenance == "fitted" and after.detail["seen"] == 6
    assert abs(after.ratio - 0.8) < 0.05 < abs(before.ratio - 0.8)
    assert after.high / after.low < before.high / before.low, "and is surer"
    assert after.low < 0.8 < after.high


def test_a_fit_says_nothing_of_what_was_not_measured(model: CostModel) -> None:
    before = {(f, m): model.predict("h", f, m) for f in ("attention", "cache") for m in ("python", "cpp")}
    for _ in range(3):
        model.learn("attention", "python", measured(0.6))
    for key, estimate in before.items():
        if key != ("attention", "python"):
            assert model.predict("h", *key) == estimate and estimate.provenance == "roofline"


@pytest.mark.parametrize("state", [State.FAILED, State.PREDICTED])
def test_it_learns_nothing_from_what_was_not_measured(model: CostModel, state: State) -> None:
    before = model.predict("h", "attention", "python")
    model.learn("attention", "python", Experiment("e", "a", 1, state, "b", False, failure="it ended"))
    assert model.predict("h", "attention", "python") == before


def test_no_prediction_is_above_what_the_machine_allows(model: CostModel) -> None:
    for _ in range(5):
        model.learn("cache", "cpp", measured(9.0))
    found = model.predict("h", "cache", "cpp")
    assert found.ratio == found.high == found.detail["bound"]


def test_a_focus_that_is_unknown_promises_nothing(model: CostModel) -> None:
    assert model.predict("h", "beauty", "python").ratio == 1.0


def test_an_author_is_believed_within_the_bound(model: CostModel) -> None:
    assert model.predict("h", "attention", "python", expected=1.7).ratio == pytest.approx(1.7)
    wild = model.predict("h", "attention", "python", expected=99.0)
    assert wild.ratio == wild.detail["bound"] == pytest.approx(2.5)


def test_an_author_who_promised_too_much_is_believed_less(model: CostModel) -> None:
    for _ in range(4):
        model.learn("attention", "python", measured(1.0), expected=2.0)
    assert model.predict("h", "attention", "python", expected=2.0).ratio == pytest.approx(1.0, abs=0.1)
    assert model.predict("h", "attention", "cpp", expected=2.0).ratio == pytest.approx(2.0), (
        "another mechanism's are their own"
    )


def test_what_is_beyond_all_that_was_measured_says_so(model: CostModel) -> None:
    for expected in (1.1, 1.3):
        model.learn("attention", "python", measured(expected), expected=expected)
    found = {e: model.predict("h", "attention", "python", expected=e).provenance for e in (0.8, 1.2, 1.4, 2.2)}
    assert found == {0.8: "extrapolated", 1.2: "fitted", 1.4: "fitted", 2.2: "extrapolated"}
    assert model.predict("h", "attention", "cpp", expected=2.2).provenance == "roofline"


def test_what_was_measured_as_expected_changes_nothing(model: CostModel) -> None:
    before = model.predict("h", "attention", "python", expected=1.5)
    model.learn("attention", "python", measured(1.5), expected=1.5)
    after = model.predict("h", "attention", "python", expected=1.5)
    assert after.ratio == pytest.approx(before.ratio) and after.high < before.high
