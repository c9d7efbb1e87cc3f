"""The archive keeps the best program of each kind, whatever the order in which it hears of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from optimizer.agents.cells import traits
from optimizer.elites import Archive, Cell
from optimizer.records import Candidate, Experiment, Proposal, State

SLOW, FAST = Cell("same", "apart", "library", "barrier"), Cell("coded", "whole step", "wide", "bytes")


def candidate(name: str) -> Candidate:
    return Candidate(f"hash of {name}", "", f"p-{name}", name, "ada", "projections", "cpp", "", "", "")


def found(
    name: str, ratio: float, spread: float = 0.02, tier: int = 1, state: State = State.DISCARD, visit: int = 1
) -> tuple[Candidate, Experiment]:
    digest = f"hash of {name}"
    if state is State.FAILED:
        return candidate(name), Experiment(f"{name}-{tier}", digest, tier, state, "base", False, failure="it crashed")
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    return candidate(name), Experiment(
        f"{name}-{tier}v{visit}", digest, tier, state, "base", True, ratio, low, high, visit=visit
    )


def of(archive: Archive) -> dict[Cell, str]:
    return {elite.cell: elite.name for elite in archive.elites()}


def by_speed(ratio: float) -> Cell:
    return SLOW if ratio < 2 else FAST


def test_each_cell_keeps_its_best() -> None:
    archive = Archive()
    for result in (found("slow", 1.1), found("slower", 0.9), found("fast", 3.0), found("faster", 3.5)):
        archive.told(*result, by_speed)
    assert of(archive) == {SLOW: "slow", FAST: "faster"}


def test_a_cell_changes_hands_for_a_better_interval_only() -> None:
    archive = Archive()
    archive.told(*found("sure", 3.0, spread=0.01), by_speed)
    archive.told(*found("lucky", 3.2, spread=0.3), by_speed)
    assert of(archive) == {FAST: "sure"}, "its middle is higher, its lower end is not"
    archive.told(*found("surer", 3.2, spread=0.01), by_speed)
    assert of(archive) == {FAST: "surer"}


def test_what_is_found_at_a_higher_tier_or_a_later_visit_is_what_counts() -> None:
    archive = Archive()
    archive.told(*found("one", 3.0), by_speed)
    archive.told(*found("two", 2.8), by_speed)
    archive.told(*found("one", 2.5, tier=2, state=State.KEEP), by_speed)
    assert of(archive) == {FAST: "two"}, "what was displaced comes back"
    archive.told(*found("one", 9.0), by_speed)
    assert of(archive) == {FAST: "two"}, "a lower tier told late changes nothing"
    archive.told(*found("two", 2.1, visit=2), by_speed)
    assert of(archive) == {FAST: "one"}


def test_what_fails_on_all_layers_leaves() -> None:
    archive = Archive()
    archive.told(*found("one", 3.0, state=State.KEEP), by_speed)
    archive.told(*found("one", 0.0, tier=2, state=State.FAILED), by_speed)
    assert of(archive) == {}


def test_unmeasured_programs_and_repeats_have_no_place() -> None:
    archive, (who, measured) = Archive(), found("one", 3.0)
    archive.told(who, replace(measured, state=State.PREDICTED), by_speed)
    archive.told(who, replace(measured, state=State.DUPLICATE, same_as="another"), by_speed)
    assert of(archive) == {}


def test_a_resumed_run_has_the_same_archive() -> None:
    results = [found(f"n{i}", 1.0 + (i * 7 % 11) / 3, spread=0.01 * (1 + i % 4)) for i in range(20)]
    results += [found(f"n{i}", 1.4 + i / 10, tier=2, state=State.KEEP) for i in range(0, 20, 3)]
    first, again = Archive(), Archive()
    for result in results:
        first.told(*result, by_speed)
    last = {who.artifact_hash: (who, experiment) for who, experiment in results}  # as a resumed session tells it
    told = list(last.values())
    random.Random(1).shuffle(told)
    for result in told:
        again.told(*result, by_speed)
    assert first.elites() == again.elites() and len(first.elites()) == 2


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("baseline", ("same", "apart", "library")),
        ("packed_linear", ("same", "apart", "library")),
        ("packed_linear + fused_qkv", ("same", "products", "library")),
        ("paged_attention", ("same", "attention + cache", "library")),
        ("whole_step", ("same", "whole step", "wide")),
        ("whole_step (PM_PANEL_VECS=2)", ("same", "whole step", "tall")),
        ("whole_step (PM_PANEL_VECS=2, PM_ROW_TILE=4)", ("same", "whole step", "small")),
        ("whole_step (PM_LAYOUT=0)", ("same", "whole step", "unpacked")),
        ("whole_step (PM_WEIGHT_BITS=12)", ("coded", "whole step", "wide")),
        ("whole_step (PM_KV_BITS=8, PM_WEIGHT_BITS=12)", ("coded+kv-int8", "whole step", "wide")),
        ("whole_step (PM_KV_BITS=8, PM_WEIGHT_BITS=4)", ("int4+kv-int8", "whole step", "wide")),
        ("triton (weights=fp8)", ("fp8", "whole step", "wide")),
    ],
)
def test_a_cell_says_what_the_program_does(name: str, cell: tuple[str, str, str]) -> None:
    given = Proposal("p", "ada", "projections", name, "", "cpp", {})
    assert traits(given) == cell


@pytest.mark.parametrize(
    "name", ["a clever idea", "whole_step (PM_PANEL_VECS=7)", "small_linear (PM_DEAL=1) + joint_kv"]
)
def test_a_program_of_another_hand_is_what_it_declares(name: str) -> None:
    given = Proposal("p", "llm-1", "projections", name, "", "cpp", {}, precision="int8")
    assert traits(given) == ("int8", "own source", "own")
    assert traits(replace(given, precision="bfloat16", mechanism="python")) == ("same", "own source", "library")
