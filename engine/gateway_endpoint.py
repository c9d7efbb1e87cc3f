"""One endpoint behind the gateway: its servers, the plan in force, and the way from one plan to the next."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import msgspec

from engine.artifacts import ArtifactError, ArtifactStore
from engine.fleet import ApiServer, ServerFailed
from engine.models.config import read_config
from engine.plan import BASELINE_VERSION, CANARY, STABLE, PlanStore, check_plan, stable_of, version
from engine.wire import EndpointSpec, ServingPlan, VersionShare

log = logging.getLogger(__name__)


class ServedEndpoint:
    """Plans are applied one after another, whole or not at all: a plan that fails leaves the one before it in force."""

    def __init__(self, spec: EndpointSpec, store: PlanStore, artifacts: ArtifactStore, data: Path) -> None:
        self.spec, self._store, self._artifacts, self._data = spec, store, artifacts, data
        self.plan = store.applied(spec.slug) or self._first_plan()
        self.wanted = store.wanted(spec.slug) or self.plan
        self.servers: dict[str, ApiServer] = {}
        self.error: str | None = None
        self._counter = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Starts the servers of the plan in force, then goes on to the wanted plan where that is newer."""
        for share in self.plan.versions:
            self._launch(share, self.plan.generation)
        self._changed.set()
        self._task = asyncio.create_task(self._reconcile(), name=f"{self.spec.slug}/plan")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(s.stop(drain_s=0) for s in self.servers.values()), *self._leaving)

    def want(self, plan: ServingPlan) -> None:
        """Stores a plan and sets out to apply it. Raises PlanError for one that is not newer or cannot be applied."""
        check_plan(plan, self.spec.slug, self._artifacts)
        self._store.save_wanted(plan)
        self.wanted, self.error = plan, None
        self._changed.set()

    def choose(self, pinned: str = "") -> ApiServer | None:
        """The server of the next request: the canary for its share of all, evenly spread. None: no such role."""
        if pinned:
            return self.servers.get(pinned)
        canary, share = self.servers.get(CANARY), version(self.plan, CANARY)
        if canary is None or share is None:
            return self.servers[STABLE]
        self._counter += 1
        turn = math.floor(self._counter * share.share + 1e-9) > math.floor((self._counter - 1) * share.share + 1e-9)
        return canary if turn else self.servers[STABLE]

    async def described(self) -> dict[str, Any]:
        await asyncio.gather(*(s.refresh() for s in self.servers.values()))
        failed = next((f"{s.role}: {s.error}" for s in self.servers.values() if s.state == "failed"), None)
        return {
            "plan": msgspec.to_builtins(self.wanted),
            "applied_generation": self.plan.generation,
            "servers": [s.described() for s in self.servers.values()],
            "error": self.error or failed,
        }

    def _first_plan(self) -> ServingPlan:
        folder = Path(self.spec.model_path)  # what is no folder is converted when its server starts, and is a Llama
        config = read_config(folder) if folder.is_dir() else None
        baseline = VersionShare(BASELINE_VERSION, self._artifacts.baseline(config).hash, 1.0, STABLE)
        plan = ServingPlan(self.spec.slug, 0, [baseline])
        self._store.save_applied(plan)
        return plan

    def _launch(self, share: VersionShare, generation: int) -> ApiServer:
        server = ApiServer(self.spec, share.role, share, generation, self._data)
        self.servers[share.role] = server
        server.start()
        return server

    async def _reconcile(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            plan = self.wanted
            if plan.generation == self.plan.generation:
                continue
            try:
                await self._apply(plan)
            except (ServerFailed, ArtifactError) as error:
                self.error = f"Generation {plan.generation} was not applied, {self.plan.generation} stays: {error}"
                log.error("%s: %s", self.spec.slug, self.error)
                await self._restore()

    async def _apply(self, plan: ServingPlan) -> None:
        """The canary first, which may take long to start, then the stable server in place, then the traffic."""
        canary = version(plan, CANARY)
        if canary is not None:
            await self._bring(canary, plan.generation)
        await self._bring(stable_of(plan), plan.generation)
        self._store.save_applied(plan)
        self.plan, self.error = plan, None
        if canary is None:
            self._dismiss_canary()

    async def _bring(self, share: VersionShare, generation: int) -> None:
        server = self.servers.get(share.role)
        if server is None:
            await self._launch(share, generation).wait_settled()
        else:
            await server.swap(share, generation)

    async def _restore(self) -> None:
        """Puts every server back to the plan in force, as far as it goes: a server that restarts comes up on it."""
        before = {v.role: v for v in self.plan.versions}
        if CANARY not in before:
            self._dismiss_canary()
        for role, server in self.servers.items():
            if server.version.artifact_hash != before[role].artifact_hash:
                try:
                    await server.swap(before[role], self.plan.generation)
                except (ServerFailed, ArtifactError) as error:
                    log.error("%s/%s cannot be put back: %s", self.spec.slug, role, error)
                    server.version = before[role]

    def _dismiss_canary(self) -> None:
        """New requests go elsewhere at once; the server ends when those it has are answered."""
        canary = self.servers.pop(CANARY, None)
        if canary is not None:
            task = asyncio.create_task(canary.stop())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
