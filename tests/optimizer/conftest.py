"""The tiny model served in float32 by one thread: artefacts, a host and running text, shared by a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from engine.models.config import ModelConfig, read_config
from engine.models.tokenizer import Tokenizer
from engine.wire import HostStatus, Status, Unload
from optimizer.traffic.prompts import source_ids

KV_BYTES = 8 << 20


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("optimizer"))


@pytest.fixture(scope="session")
def baseline(artifacts: ArtifactStore) -> Artifact:
    return artifacts.baseline()


@pytest.fixture(scope="session")
def twin(artifacts: ArtifactStore, baseline: Artifact) -> Artifact:
    """The baseline's very program as a candidate of its own."""
    return artifacts.put(baseline.files(), name="twin", settings=dict(baseline.manifest.settings))


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path) -> ModelConfig:
    return read_config(tiny_model)


@pytest.fixture(scope="session")
def text(tiny_model: Path) -> tuple[int, ...]:
    return source_ids(Tokenizer(tiny_model).encode)


@pytest.fixture(scope="session")
def shared_host(tiny_model: Path) -> Iterator[HostClient]:
    with HostClient(tiny_model, dtype="float32", threads=1, kv_bytes=KV_BYTES) as host:
        yield host


@pytest.fixture
def host(shared_host: HostClient) -> Iterator[HostClient]:
    """A host with nothing resident. A test that takes it down or spoils it leaves a fresh one behind."""
    if not shared_host.alive:
        shared_host.restart()
    yield shared_host
    if shared_host.alive:
        status = shared_host.call(Status())
        assert isinstance(status, HostStatus)
        for digest, layers in status.resident:
            shared_host.call(Unload(digest, layers))


def rewritten(artifacts: ArtifactStore, baseline: Artifact, name: str, behind: str) -> Artifact:
    """The baseline's source with text behind it, as a candidate."""
    return artifacts.put({"forward.py": baseline.files()["forward.py"] + behind}, name=name)
