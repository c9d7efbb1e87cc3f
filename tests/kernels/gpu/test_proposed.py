"""What the agents propose for a GPU, built and loaded as any candidate and run under the interpreter: values and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine import wire
from engine.artifacts import ArtifactStore
from engine.batching import SeqStep, make_batch
from engine.host import Host
from engine.models.config import read_config
from kernels.gpu import tunables
from optimizer.agents.device import DeviceAgent
from optimizer.builder import Builder, Built
from optimizer.export.finish import cleaned
from optimizer.records import Proposal
from tests.conftest import write_tiny_model
from tests.kernels.gpu.test_device_step import SAME
from tests.optimizer.agents.test_agents import measured
from tests.optimizer.agents.test_device import H200, on

TOKENS = [(i * i * 7 + 13 * i) % 290 + 3 for i in range(40)]
PRODUCTS = {"fp8": {"fp8_matmul"}, "int8": {"int8_matmul"}, "int4": {"int4_matmul"}}
DISTANCE = {"same": 1e-4, "int8": 0.05, "fp8": 0.2, "int4": 0.5}  # of the logits, relative


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proposed") / "model"
    write_tiny_model(folder, num_hidden_layers=1, max_position_embeddings=64)
    return folder


@pytest.fixture
def host(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The host's own handlers in this process; what would outlast a test is left out."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: None)
    yield Host(model, "float32", 1, 1 << 17, [])


@pytest.fixture(scope="module")
def proposals(model: Path) -> list[Proposal]:
    """Every program of the device agent for the tiny model on an H200, its first the fastest."""
    view = on(H200.gpu, config=asdict(read_config(model)), dtype="float32", tolerance="quantised")
    agent, made = DeviceAgent(0), []
    while (proposal := agent.propose(view)) is not None:
        made.append(proposal)
        speed = 20.0 if proposal.name == "triton" else 1.5
        agent.told(*measured(proposal, speed))
    return made


def named(proposals: list[Proposal], fits: Callable[[Proposal], bool]) -> Proposal:
    return next(p for p in proposals if fits(p))


def few_pieces(proposal: Proposal) -> Proposal:
    """The same program with contexts in two pieces, which is another value of a declared parameter."""
    triton = {**proposal.settings.get("triton", {}), "paged_decode_attention": {"SPLITS": 2}}
    return replace(proposal, settings={**proposal.settings, "triton": triton})


def answered(host: Host, built: Built | None) -> tuple[np.ndarray, dict[str, str]]:
    """(logits of a prefill and of a decode after it, the dispatch report)."""
    artifact = built.artifact if built else ArtifactStore(host.folder.parent).baseline()
    host.load(wire.Load(artifact.hash, str(artifact.path)))
    logits = []
    for step in ([SeqStep(1, TOKENS[:20], 0, [1, 3])], [SeqStep(1, TOKENS[20:21], 20, [1, 3])]):
        done = host.step(wire.Step(artifact.hash, make_batch(step, 16), want_logits=True))
        logits.append(np.frombuffer(done.logits, np.float32))
    status = msgspec.msgpack.decode(msgspec.msgpack.encode(host.status(wire.Status())), type=wire.HostStatus)
    return np.concatenate(logits), status.dispatch


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("kind", tunables.KINDS)
def test_a_proposed_program_loads_computes_the_model_and_names_its_kernels(
    host: Host, proposals: list[Proposal], kind: str, tmp_path: Path
) -> None:
    proposal = named(proposals, lambda p: p.name == ("triton" if kind == "same" else f"triton (weights={kind})"))
    built = Builder(tmp_path).build(few_pieces(proposal))
    assert built.failure == "" and built.artifact.manifest.device == "cuda"
    want, _ = answered(host, None)
    got, dispatch = answered(host, built)
    assert np.isfinite(got).all() and distance(got, want) < DISTANCE[kind]
    expected = SAME if kind == "same" else SAME - {"small_m_matmul", "gated_mlp"} | PRODUCTS[kind] | {"silu_mul"}
    assert set(dispatch) == expected and all(int(launches) > 0 for launches in dispatch.values())


def test_a_proposed_parameter_reaches_the_launch_and_leaves_the_values(
    host: Host, proposals: list[Proposal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variation of each operator of the step; what the launch was given is what the proposal says."""
    given: dict[str, dict[str, int]] = {}
    resolve = tunables.resolve
    monkeypatch.setattr(tunables, "resolve", lambda name, values=None: given.setdefault(name, resolve(name, values)))
    want, _ = answered(host, None)
    for operator in tunables.in_step("same"):
        proposal = named(
            proposals, lambda p, o=operator: set(p.settings) == {"triton"} and set(p.settings["triton"]) == {o}
        )
        changed = proposal if operator == "paged_decode_attention" else few_pieces(proposal)
        given.clear()
        got, _ = answered(host, Builder(tmp_path).build(changed))
        assert distance(got, want) < DISTANCE["same"]
        for name, value in proposal.settings["triton"][operator].items():
            assert given[operator][name] == value


@pytest.mark.parametrize("kind", tunables.KINDS)
def test_the_parameters_offered_are_those_that_a_step_reads(
    host: Host, proposals: list[Proposal], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    resolve = tunables.resolve
    monkeypatch.setattr(tunables, "resolve", lambda name, values=None: (read.add(name), resolve(name, values))[1])
    proposal = named(proposals, lambda p: p.settings.get("weights", "same") == kind)
    answered(host, Builder(tmp_path).build(few_pieces(proposal)))
    assert read == set(tunables.in_step(kind))


def test_a_program_without_graphs_is_proposed_and_loads(host: Host, proposals: list[Proposal], tmp_path: Path) -> None:
    proposal = named(proposals, lambda p: p.settings == {"graphs": 0})
    got, _ = answered(host, Builder(tmp_path).build(few_pieces(proposal)))
    assert distance(got, answered(host, None)[0]) < DISTANCE["same"]


def test_its_cleaned_source_computes_the_same_through_the_same_kernels(
    host: Host, proposals: list[Proposal], tmp_path: Path
) -> None:
    """What a finalist is verified and given away as."""
    proposal = few_pieces(named(proposals, lambda p: p.name == "triton"))
    cleaned_one = replace(proposal, files=cleaned(proposal.files))
    assert cleaned_one.files != proposal.files
    logits, dispatch = answered(host, Builder(tmp_path).build(proposal))
    again, same = answered(host, Builder(tmp_path).build(cleaned_one))
    assert np.array_equal(logits, again) and dispatch == same
