"""Endpoints and their serving plans on disk, so that a restarted gateway needs no database. Torch-free.

endpoints/<slug>/endpoint.json    what is served
endpoints/<slug>/plan.json        the plan that was asked for
endpoints/<slug>/applied.json     the last plan that took effect: what a restarted gateway starts on
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.artifacts import ArtifactError, ArtifactStore
from engine.wire import EndpointSpec, ServingPlan, VersionShare

STABLE, CANARY = "stable", "canary"
BASELINE_VERSION = "baseline"
PARALLEL_SIZES = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
T = TypeVar("T")


class PlanError(ValueError):
    """A plan or endpoint that cannot be taken; the text names the mend. `conflict`: its generation is not newer."""

    def __init__(self, message: str, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


def version(plan: ServingPlan, role: str) -> VersionShare | None:
    return next((v for v in plan.versions if v.role == role), None)


def stable_of(plan: ServingPlan) -> VersionShare:
    found = version(plan, STABLE)
    assert found is not None, "a checked plan has a stable version"
    return found


def check_slug(slug: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", slug):
        raise PlanError(f"{slug!r} cannot name an endpoint: use up to 64 lower-case letters, digits, dots, - and _.")
    return slug


def check_parallel(spec: EndpointSpec) -> None:
    """Raises PlanError naming the first parallel size that is not one: a version runs in one process on one device."""
    for name in PARALLEL_SIZES:
        size = getattr(spec, name)
        if size != 1:
            raise PlanError(f"{name} = {size} cannot be served: a version runs on one device. Set {name} to 1.")


def check_plan(plan: ServingPlan, slug: str, artifacts: ArtifactStore) -> None:
    """Raises PlanError unless `plan` can be applied to endpoint `slug`: roles, shares and artefacts."""
    if plan.endpoint != slug:
        raise PlanError(f"The plan is for endpoint {plan.endpoint!r} and was sent to {slug!r}.")
    roles = [v.role for v in plan.versions]
    if roles.count(STABLE) != 1 or roles.count(CANARY) > 1 or set(roles) - {STABLE, CANARY}:
        raise PlanError(f"A plan has one stable version and at most one canary; this one has {roles}.")
    if not all(0 <= v.share <= 1 for v in plan.versions) or not math.isclose(sum(v.share for v in plan.versions), 1):
        raise PlanError(f"Shares lie between 0 and 1 and add up to 1, unlike {[v.share for v in plan.versions]}.")
    if len({v.version_id for v in plan.versions}) != len(plan.versions):
        raise PlanError("Stable and canary are the same version; leave the canary out.")
    for v in plan.versions:
        try:
            artifacts.get(v.artifact_hash)
        except ArtifactError as error:
            raise PlanError(f"Version {v.version_id} cannot be served: {error}") from error


class PlanStore:
    """Reads and writes one data folder. Every write is atomic and durable before the call returns."""

    def __init__(self, data_dir: Path) -> None:
        self.root = Path(data_dir).resolve() / "endpoints"
        self.root.mkdir(parents=True, exist_ok=True)

    def slugs(self) -> list[str]:
        return sorted(p.parent.name for p in self.root.glob("*/endpoint.json"))

    def folder(self, slug: str) -> Path:
        return self.root / check_slug(slug)

    def endpoint(self, slug: str) -> EndpointSpec:
        found = self._read(slug, "endpoint.json", EndpointSpec)
        if found is None:
            raise PlanError(f"There is no endpoint {slug!r}.")
        return found

    def save_endpoint(self, spec: EndpointSpec) -> None:
        """Raises PlanError for parallel sizes that cannot be served."""
        check_parallel(spec)
        self._write(spec.slug, "endpoint.json", spec)

    def remove(self, slug: str) -> None:
        shutil.rmtree(self.folder(slug), ignore_errors=True)

    def wanted(self, slug: str) -> ServingPlan | None:
        return self._read(slug, "plan.json", ServingPlan)

    def applied(self, slug: str) -> ServingPlan | None:
        return self._read(slug, "applied.json", ServingPlan)

    def save_wanted(self, plan: ServingPlan) -> None:
        """Raises PlanError (a conflict) unless the plan is newer than the one that is there."""
        there = self.wanted(plan.endpoint)
        if there is not None and plan.generation <= there.generation:
            raise PlanError(
                f"Generation {plan.generation} is not newer than {there.generation}, the one in force; read it first.",
                conflict=True,
            )
        self._write(plan.endpoint, "plan.json", plan)

    def save_applied(self, plan: ServingPlan) -> None:
        self._write(plan.endpoint, "applied.json", plan)

    def _read(self, slug: str, name: str, kind: type[T]) -> T | None:
        path = self.folder(slug) / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise PlanError(f"{path} cannot be read: {error}. Restore it or remove it.") from error

    def _write(self, slug: str, name: str, value: EndpointSpec | ServingPlan) -> None:
        folder = self.folder(slug)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, msgspec.json.format(msgspec.json.encode(value), indent=1))


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """`path` holds either what it held or all of `content`, also after a power cut."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
