"""Plans and endpoints on disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.plan import PARALLEL_SIZES, PlanError, PlanStore, check_plan, check_slug, write_atomically
from engine.wire import EndpointSpec, ServingPlan, VersionShare


def plan(generation: int, *versions: tuple[str, str, float, str]) -> ServingPlan:
    return ServingPlan("demo", generation, [VersionShare(*v) for v in versions])


def test_what_was_saved_is_read_by_another_store(tmp_path: Path) -> None:
    spec = EndpointSpec("demo", "/models/demo", threads=2)
    first = PlanStore(tmp_path)
    first.save_endpoint(spec)
    first.save_wanted(plan(3, ("b", "h", 1.0, "stable")))
    first.save_applied(plan(2, ("a", "h", 1.0, "stable")))
    again = PlanStore(tmp_path)
    assert again.slugs() == ["demo"] and again.endpoint("demo") == spec
    wanted, applied = again.wanted("demo"), again.applied("demo")
    assert wanted is not None and applied is not None
    assert (wanted.generation, applied.generation) == (3, 2)
    again.remove("demo")
    assert again.slugs() == [] and again.wanted("demo") is None


@pytest.mark.parametrize("name", PARALLEL_SIZES)
def test_a_parallel_size_above_one_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Recorded as one when it is not said; a spec that says more is not stored."""
    store, spec = PlanStore(tmp_path), EndpointSpec("demo", "/models/demo")
    store.save_endpoint(spec)
    assert f'"{name}": 1' in (tmp_path / "endpoints/demo/endpoint.json").read_text().replace('":1', '": 1')
    with pytest.raises(PlanError, match=f"{name} = 2 cannot be served"):
        store.save_endpoint(msgspec.structs.replace(spec, **{name: 2}))
    assert store.endpoint("demo") == spec


@pytest.mark.parametrize("generation", [2, 3])
def test_a_plan_that_is_not_newer_is_a_conflict(tmp_path: Path, generation: int) -> None:
    store = PlanStore(tmp_path)
    store.save_wanted(plan(3, ("a", "h", 1.0, "stable")))
    with pytest.raises(PlanError, match="not newer than 3") as caught:
        store.save_wanted(plan(generation, ("a", "h", 1.0, "stable")))
    assert caught.value.conflict


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.save_wanted(plan(1, ("a", "h", 1.0, "stable")))
    (tmp_path / "endpoints" / "demo" / "plan.json").write_text('{"endpoint": "demo"')
    with pytest.raises(PlanError, match=r"plan\.json cannot be read"):
        store.wanted("demo")


@pytest.mark.parametrize("slug", ["", "../up", "Demo", "a/b", ".hidden", "x" * 65])
def test_a_slug_cannot_leave_its_folder(tmp_path: Path, slug: str) -> None:
    with pytest.raises(PlanError):
        check_slug(slug)
    with pytest.raises(PlanError):
        PlanStore(tmp_path).folder(slug)


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"before", 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_sound_plan_passes(artifacts: ArtifactStore, baseline: Artifact, other: Artifact) -> None:
    check_plan(
        plan(1, ("a", baseline.hash, 0.9, "stable"), ("b", other.hash, 0.1, "canary")),
        "demo",
        artifacts,
    )


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ([], "one stable"),
        ([("a", "BASE", 1.0, "canary")], "one stable"),
        ([("a", "BASE", 0.5, "stable"), ("b", "BASE", 0.5, "stable")], "one stable"),
        ([("a", "BASE", 0.5, "stable"), ("b", "BASE", 0.5, "shadow")], "one stable"),
        ([("a", "BASE", 0.5, "stable"), ("b", "BASE", 0.4, "canary")], "add up to 1"),
        ([("a", "BASE", 1.5, "stable"), ("b", "BASE", -0.5, "canary")], "between 0 and 1"),
        ([("a", "BASE", 0.5, "stable"), ("a", "BASE", 0.5, "canary")], "same version"),
        ([("a", "f" * 64, 1.0, "stable")], "no artefact"),
        ([("a", "nonsense", 1.0, "stable")], "not an artefact hash"),
    ],
)
def test_a_plan_that_cannot_be_applied_says_why(
    artifacts: ArtifactStore, baseline: Artifact, versions: list[tuple[str, str, float, str]], named: str
) -> None:
    filled = [(v, baseline.hash if h == "BASE" else h, share, role) for v, h, share, role in versions]
    with pytest.raises(PlanError, match=named):
        check_plan(plan(1, *filled), "demo", artifacts)
    with pytest.raises(PlanError, match="sent to 'else'"):
        check_plan(plan(1, *filled), "else", artifacts)
