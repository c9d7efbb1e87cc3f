"""A host, artefacts and servers on the tiny model, shared by a session: starting one takes a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.wire import HostStatus, Status, Unload
from tests.serving import Server, serve

KV_BYTES = 8 << 20
TINY_OPTIONS = ["--dtype", "float32", "--threads", "1", "--kv-bytes", str(KV_BYTES)]


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("artefacts"))


@pytest.fixture(scope="session")
def baseline(artifacts: ArtifactStore) -> Artifact:
    return artifacts.baseline()


@pytest.fixture(scope="session")
def other(artifacts: ArtifactStore, baseline: Artifact) -> Artifact:
    """Another version of the same arithmetic."""
    return artifacts.put(baseline.files(), name="other", settings={"block_size": 32, "prefill_chunk": 64})


@pytest.fixture(scope="session")
def tiny_host(tiny_model: Path) -> Iterator[HostClient]:
    """One host for every test of the engine; a test that kills it leaves a fresh one behind."""
    with HostClient(tiny_model, dtype="float32", threads=1, kv_bytes=KV_BYTES) as host:
        yield host


@pytest.fixture
def host(tiny_host: HostClient) -> Iterator[HostClient]:
    """The shared host, alive and left with nothing resident."""
    if not tiny_host.alive:
        tiny_host.restart()
    yield tiny_host
    if tiny_host.alive:
        status = tiny_host.call(Status())
        assert isinstance(status, HostStatus)
        for artifact_hash, layers in status.resident:
            tiny_host.call(Unload(artifact_hash, layers))


@pytest.fixture(scope="module")
def api(tiny_model: Path, baseline: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An API server of the module's own."""
    arguments = ["--model", str(tiny_model), "--name", "tiny", "--artifact", str(baseline.path), *TINY_OPTIONS]
    with serve("engine.api", arguments, tmp_path_factory.mktemp("api") / "api.log") as server:
        yield server


@pytest.fixture
def http(api: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=60) as client:
        yield client
