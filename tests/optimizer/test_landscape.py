"""Searches on a recorded landscape: nothing outside the record is measured, noise is seeded, all contenders pay the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.models.config import ModelConfig, read_config
from optimizer.agents.base import SearchView
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.measure.tiers import WrongValues
from tests.bench.searching import as_proposal
from tests.landscape import made_up, rivals, space
from tests.landscape.clock import Clock
from tests.landscape.lab import TableBuilder, TableLab, TableWorkshop
from tests.landscape.replay import ABLATIONS, OURS, RANDOM, TPE, Replayed, replay
from tests.landscape.table import Landscape, NotRecorded, Row

LAND = made_up.landscape()


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> ModelConfig:
    return read_config(tiny_model)


@pytest.fixture
def lab(config: ModelConfig, tmp_path: Path) -> TableLab:
    return TableLab(LAND, config, ArtifactStore(tmp_path), Clock(), seed=1)


def built(lab: TableLab, name: str) -> Artifact:
    proposal = as_proposal(Program.of(["rms_norm"]))
    return Builder(lab.artifacts.root).store(replace(proposal, name=name))


def test_the_space_is_a_few_hundred_programs_and_a_sampler_draws_no_other() -> None:
    assert 150 <= len(space.programs()) <= 400 and len(space.names()) == len(space.programs())
    assert {u for p in space.programs() for u in space.units(p)} == set(LAND.builds)
    agent = rivals.Tpe(seed=1)
    drawn = [p.name for _ in range(30) if (p := agent.propose(SearchView()))]
    assert len(set(drawn)) == 30 and set(drawn) <= space.names()
    assert space.canonical(Program.parse("whole_step (PM_DEAL=0, PM_SPIN=1000)")).name == "whole_step (PM_SPIN=1000)"


def test_what_is_not_recorded_is_refused(lab: TableLab) -> None:
    with pytest.raises(NotRecorded, match=r"joint_kv is not recorded: record .* tests.landscape.record"):
        lab.tier_one(built(lab, "joint_kv"), None, 60)
    with pytest.raises(NotRecorded):
        lab.tier_two(built(lab, "joint_kv"), None)
    assert lab.clock() == 0


def test_what_failed_when_it_was_recorded_fails_again(config: ModelConfig, tmp_path: Path) -> None:
    rows = {**LAND.rows, "rms_norm": Row("rms_norm", "b", "wrong values", load_s=0.5)}
    lab = TableLab(replace(LAND, rows=rows), config, ArtifactStore(tmp_path), Clock())
    with pytest.raises(WrongValues, match="wrong values"):
        lab.tier_one(built(lab, "rms_norm"), None, 60)
    assert lab.clock() == 0.5


def test_noise_is_the_recorded_one_and_seeded(config: ModelConfig, tmp_path: Path) -> None:
    def pairs(seed: int) -> list[tuple[float, ...]]:
        lab = TableLab(LAND, config, ArtifactStore(tmp_path), Clock(), seed)
        return [lab.tier_one(built(lab, "fused_qkv"), None, 60).ratio.ratios for _ in range(2)]

    first, again = pairs(1)
    assert pairs(1) == [first, again] and first != again and pairs(2)[0] != first
    recorded = {round(made_up.FACTORS["fused_qkv"] * math.exp(log), 9) for log in LAND.scatter[1]}
    assert {round(r, 9) for r in (*first, *again)} <= recorded


def test_both_tiers_move_the_clock_by_what_was_recorded(lab: TableLab) -> None:
    found = lab.tier_one(built(lab, "fused_qkv"), None, 60)
    row = LAND.row("fused_qkv")
    pair_s = row.pair_s * (1 / 1.05 + 1) / (1 / 1.05 + 1 / 3.2)
    assert lab.clock() == pytest.approx(row.load_s + pair_s * found.ratio.pairs)
    before = lab.clock()
    second = lab.tier_two(built(lab, "fused_qkv"), built(lab, "whole_step"))
    assert second.over_incumbent is not None and second.over_incumbent.ratio == pytest.approx(1.05 / 3.2, rel=0.1)
    assert lab.clock() - before == pytest.approx(0.8 + 0.55 * (1 + 1 / 1.05 + 1 / 3.2) * second.ratio.pairs, rel=0.1)


def test_the_compiler_works_while_nothing_is_timed_and_never_twice(tmp_path: Path) -> None:
    clock = Clock()
    workshop = TableWorkshop(TableBuilder(tmp_path).build, LAND, clock)
    whole = as_proposal(Program.of([space.WHOLE]))
    workshop.want([whole])
    clock.advance(100, timed=True)
    assert not workshop.ready(whole)
    clock.advance(4.0)  # a compiler beside an engine that loads has half a core
    workshop.take(whole)
    assert clock() == pytest.approx(104 + 5.1 - 2.0) and workshop.ready(whole)
    other = as_proposal(Program.of([space.WHOLE], PM_SPIN=1000))
    assert workshop.left(other) == pytest.approx(LAND.link_s), "values read at run time need no compiler"
    assert workshop.left(as_proposal(Program.of([space.WHOLE], PM_WEIGHT_BITS=12))) == pytest.approx(5.1)
    assert workshop.left(as_proposal(Program.of(["rms_norm"]))) == 0


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "landscape.json"
    LAND.write(path)
    read = Landscape.read(path)
    assert read.speed(made_up.BEST, 2) == pytest.approx(LAND.speed(made_up.BEST, 2), rel=1e-4)
    assert set(read.rows) == set(LAND.rows) and path.stat().st_size < 200_000
    with pytest.raises(NotRecorded):
        Landscape.read(tmp_path / "none.json")


def test_without_a_record_tier_two_is_foreseen_from_tier_one() -> None:
    rows = {
        n: replace(r, second=() if "SPIN=1000" in n else tuple(0.9 * s for s in r.second)) for n, r in LAND.rows.items()
    }
    rows["baseline"] = LAND.rows["baseline"]
    land = replace(LAND, rows=rows)
    assert land.speed("whole_step (PM_SPIN=1000)", 2) == pytest.approx(0.9 * LAND.speed("whole_step (PM_SPIN=1000)", 1))


BUDGET_S = 60.0


@pytest.fixture(scope="module")
def searched(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Replayed]:
    folder = tmp_path_factory.mktemp("replays")
    return {c.name: replay(LAND, config, c, 3, BUDGET_S, folder) for c in (OURS, RANDOM, TPE, *ABLATIONS)}


def test_contenders_get_the_same_budget_and_confirm_by_the_same_rule(searched: dict[str, Replayed]) -> None:
    assert len(searched) == 6
    for name, found in searched.items():
        assert BUDGET_S - 25 < found.ended_s < BUDGET_S + 15, name  # a trial that was begun is ended
        assert found.counts["tier2"] >= len(found.moments) >= 1, "what leads was measured on all layers"
        assert found.counts["failed"] == 0, "nothing outside the record was proposed"
    assert searched["ours, no tier 1"].counts["tier1"] == 0
    assert all(found.counts["tier1"] > 8 for name, found in searched.items() if name != "ours, no tier 1")


def test_equal_seeds_replay_equally(searched: dict[str, Replayed], config: ModelConfig, tmp_path: Path) -> None:
    for contender in (OURS, TPE):
        again = replay(LAND, config, contender, 3, BUDGET_S, tmp_path)
        assert again.moments == searched[contender.name].moments
    assert replay(LAND, config, RANDOM, 4, BUDGET_S, tmp_path).moments != searched[RANDOM.name].moments


def test_what_was_best_at_a_time_and_when_a_speed_was_reached() -> None:
    found = Replayed("ours", 1, 100.0, [(10.0, "a", 2.0), (60.0, "b", 3.0)])
    assert [found.best(share) for share in (0.05, 0.25, 0.5, 1.0)] == [1.0, 2.0, 2.0, 3.0]
    assert found.reached(2.5) == 60.0 and found.reached(3.5) == float("inf")
