"""The engine host under candidates that are wrong, hostile or unlucky: each costs one clear failure and loses nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.batching import SeqStep, make_batch
from engine.client import HostClient, HostFailure
from engine.wire import (
    BlockDone,
    HostStatus,
    Load,
    Loaded,
    Prepare,
    SampleRow,
    Status,
    Step,
    StepDone,
    TimedBlock,
    Unload,
)
from tests.engine.conftest import KV_BYTES

PROMPT = [5, 9, 13, 17]
FAKE = """
import torch
from engine.contract import KVPool
class Forward:
    def __init__(self, model, settings): self.vocab = model.config.vocab_size
    def allocate(self, blocks): return KVPool((torch.zeros(blocks, 16, 8),), 16, 16 * 8 * 4)
    def __call__(self, batch, kv):
        {body}
def build(model, settings):
    {build}
    return Forward(model, settings)
"""


@pytest.fixture
def host(tiny_host: HostClient) -> Iterator[HostClient]:
    if not tiny_host.alive:
        tiny_host.restart()
    yield tiny_host


def candidate(artifacts: ArtifactStore, body: str = "raise NotImplementedError", build: str = "pass") -> Artifact:
    return artifacts.put({"forward.py": FAKE.format(body=body, build=build)}, name="hostile")


def load(host: HostClient, artifact: Artifact, timeout_s: float = 60, kv_bytes: int = 1 << 20) -> Loaded:
    loaded = host.call(Load(artifact.hash, str(artifact.path), kv_bytes=kv_bytes), timeout_s)
    assert isinstance(loaded, Loaded)
    return loaded


def step(host: HostClient, artifact: Artifact, timeout_s: float = 60) -> StepDone:
    batch = make_batch([SeqStep(1, PROMPT, 0, [0])], 16)
    done = host.call(Step(artifact.hash, batch, [SampleRow(temperature=0)]), timeout_s)
    assert isinstance(done, StepDone)
    return done


def answers_still(host: HostClient, baseline: Artifact) -> list[int]:
    load(host, baseline)
    return step(host, baseline).token_ids


# a candidate's error is a reply and the host lives on

WRONG = {
    "a syntax error": ("return torch.zeros(1", "pass", "candidate_error", "SyntaxError"),
    "raises while building": ("pass", "raise ValueError('no such layout')", "candidate_error", "no such layout"),
    "asks for a library it has not": ("pass", "settings.library('gemm')", "candidate_error", "gemm"),
    "exits": ("pass", "raise SystemExit(3)", "candidate_error", "SystemExit"),
    "builds nothing": ("pass", "return 7", "bad_candidate", "build()"),
}
BAD_STEPS = {
    "raises": ("raise RuntimeError('boom')", "candidate_error", "boom"),
    "exits": ("import sys; sys.exit(0)", "candidate_error", "SystemExit"),
    "another shape": ("return torch.zeros(1, 7)", "bad_output", "(1, 7)"),
    "another dtype": ("return torch.zeros(1, self.vocab, dtype=torch.bfloat16)", "bad_output", "bfloat16"),
    "not a number": ("return torch.full((1, self.vocab), float('nan'))", "bad_output", "NaN"),
    "infinity": ("return torch.full((1, self.vocab), float('inf'))", "bad_output", "infinity"),
    "a list": ("return [0.0] * self.vocab", "bad_output", "list"),
    "a tensor of its own kind": (
        "return torch.zeros(1, self.vocab).as_subclass(type('T', (torch.Tensor,), {}))", "bad_output", "T ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "build", "code", "said"), WRONG.values(), ids=WRONG)
def test_a_candidate_that_does_not_load(
    host: HostClient, artifacts: ArtifactStore, baseline: Artifact, body: str, build: str, code: str, said: str
) -> None:
    pid = host.pid
    with pytest.raises(HostFailure) as caught:
        load(host, candidate(artifacts, body, build))
    assert caught.value.code == code and not caught.value.fatal and said in caught.value.message
    assert answers_still(host, baseline) and host.pid == pid


@pytest.mark.parametrize(("body", "code", "said"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_that_fails(
    host: HostClient, artifacts: ArtifactStore, baseline: Artifact, body: str, code: str, said: str
) -> None:
    artifact, pid = candidate(artifacts, body), host.pid
    load(host, artifact)
    with pytest.raises(HostFailure) as caught:
        step(host, artifact)
    assert caught.value.code == code and not caught.value.fatal and said in caught.value.message
    assert answers_still(host, baseline) and host.pid == pid


def test_the_log_names_the_candidate_s_line(host: HostClient, artifacts: ArtifactStore) -> None:
    artifact = candidate(artifacts, "raise RuntimeError('boom')")
    load(host, artifact)
    with pytest.raises(HostFailure) as caught:
        step(host, artifact)
    assert "raise RuntimeError('boom')" in caught.value.log_tail and "forward.py" in caught.value.log_tail


def test_pools_that_lie_are_refused(host: HostClient, artifacts: ArtifactStore) -> None:
    for wrong, said in (
        ("torch.zeros(3, 16, 8)", "dimension 0"),
        ("torch.zeros(blocks, 16, 800)", "said 512 a block"),
    ):
        text = FAKE.format(body="pass", build="pass").replace("torch.zeros(blocks, 16, 8)", wrong)
        with pytest.raises(HostFailure, match=said):
            load(host, artifacts.put({"forward.py": text}, name="lies"))


def test_what_a_candidate_prints_is_in_the_log_and_not_in_the_protocol(
    host: HostClient, artifacts: ArtifactStore, baseline: Artifact
) -> None:
    says = "print('printed by a candidate', flush=True); import os; os.write(1, b'written to 1'); return torch.zeros(1, self.vocab)"
    artifact = candidate(artifacts, says)
    load(host, artifact)
    assert step(host, artifact).token_ids == [0]
    assert "printed by a candidate" in host.log_tail() and "written to 1" in host.log_tail()
    assert answers_still(host, baseline)


# a candidate that takes the host with it: the host is ended, says why, and the next one starts

FATAL = {
    "loops for ever": ("while True: pass", "host_timeout", "did not answer in time"),
    "ends the process": ("import os; os._exit(7)", "host_exited", "exit status 7"),
    "kills itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "host_exited", "-9"),
    "reads what is not there": ("import ctypes; ctypes.string_at(0)", "host_exited", "-11"),
    "allocates everything": (
        "hoard = []\n        while True: hoard.append(torch.ones(1 << 22))", "out_of_memory", "allocates too much",
    ),
}  # fmt: skip


@pytest.fixture
def small_host(tiny_model: Path) -> Iterator[HostClient]:
    host = HostClient(tiny_model, dtype="float32", threads=1, kv_bytes=KV_BYTES, memory_limit_bytes=900 << 20)
    with host:
        yield host


@pytest.mark.parametrize("where", ["build", "step"])
@pytest.mark.parametrize(("body", "code", "said"), FATAL.values(), ids=FATAL)
def test_a_candidate_that_ends_its_host(
    small_host: HostClient, artifacts: ArtifactStore, baseline: Artifact, body: str, code: str, said: str, where: str
) -> None:
    at_step = candidate(artifacts, body)
    at_build = candidate(artifacts, build=body.replace("\n        ", "\n    "))
    expected = answers_still(small_host, baseline)
    with pytest.raises(HostFailure) as caught:
        if where == "build":
            load(small_host, at_build, timeout_s=20 if code == "out_of_memory" else 3)
        else:
            load(small_host, at_step)
            step(small_host, at_step, timeout_s=20 if code == "out_of_memory" else 1)
    assert caught.value.code == code and caught.value.fatal and said in str(caught.value)
    assert not small_host.alive
    with pytest.raises(HostFailure) as again:  # until it is restarted every call says so at once
        small_host.call(Status())
    assert again.value.fatal
    before = small_host.pid
    small_host.restart()
    assert answers_still(small_host, baseline) == expected and small_host.pid != before


def test_a_host_killed_from_outside_is_said_so(small_host: HostClient, baseline: Artifact) -> None:
    os.kill(small_host.pid, signal.SIGKILL)
    with pytest.raises(HostFailure) as caught:
        load(small_host, baseline)
    assert caught.value.code == "host_exited" and caught.value.fatal


# residents side by side


def test_baseline_and_incumbent_stay_beside_a_new_candidate(
    host: HostClient, artifacts: ArtifactStore, baseline: Artifact, other: Artifact
) -> None:
    first, second = load(host, baseline), load(host, other)
    before = host.call(Status())
    assert first.writer_hash != second.writer_hash, "pools of different versions carry different names"
    expected = step(host, baseline).token_ids
    constant = candidate(artifacts, "out = torch.zeros(1, self.vocab); out[0, 42] = 1; return out")
    load(host, constant)
    assert step(host, constant).token_ids == [42]
    assert step(host, baseline).token_ids == step(host, other).token_ids == expected
    after = host.call(Status())
    assert isinstance(before, HostStatus) and isinstance(after, HostStatus)
    assert (after.pid, after.weights_mapping) == (before.pid, before.weights_mapping)
    assert {(a.hash, 0) for a in (baseline, other, constant)} <= set(after.resident)
    for artifact in (constant, other):
        host.call(Unload(artifact.hash))
    with pytest.raises(HostFailure, match="was not loaded"):
        step(host, constant)
    assert step(host, baseline).token_ids == expected


def test_a_new_module_for_each_content(host: HostClient, artifacts: ArtifactStore) -> None:
    """The same class names in two candidates are two classes: nothing is reloaded in place."""
    ones = [candidate(artifacts, f"out = torch.zeros(1, self.vocab); out[0, {i}] = 1; return out") for i in (3, 4)]
    for artifact in ones:
        load(host, artifact)
    assert [step(host, a).token_ids for a in (*ones, *ones)] == [[3], [4], [3], [4]]


def test_a_changed_file_is_not_loaded(host: HostClient, tmp_path: Path) -> None:
    artifact = candidate(ArtifactStore(tmp_path))
    (artifact.path / "forward.py").write_text("import os")
    with pytest.raises(HostFailure) as caught:
        load(host, artifact)
    assert caught.value.code == "artifact_damaged" and "was changed" in caught.value.message


def test_logits_come_back_when_wanted(host: HostClient, baseline: Artifact) -> None:
    load(host, baseline)
    batch = make_batch([SeqStep(1, PROMPT, 0, [0], all_logits=True)], 16)
    done = host.call(Step(baseline.hash, batch, want_logits=True))
    assert isinstance(done, StepDone)
    logits = np.frombuffer(done.logits, np.float32).reshape(len(PROMPT), 512)
    assert int(logits[-1].argmax()) == step(host, baseline).token_ids[0]


def test_a_prepared_schedule_runs_as_often_as_asked(host: HostClient, baseline: Artifact) -> None:
    load(host, baseline)
    steps = [make_batch([SeqStep(1, PROMPT, 0, [0])], 16), make_batch([SeqStep(1, [21], 4, [0])], 16)]
    host.call(Prepare("s", steps))
    done = host.call(TimedBlock(baseline.hash, "s", repeats=3))
    assert isinstance(done, BlockDone)
    assert done.argmax[0] == step(host, baseline).token_ids[0] and len(done.argmax) == 2


def test_an_idle_host_uses_no_processor_time(host: HostClient) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{host.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    host.call(Status())
    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 2


def test_closing_ends_the_process_and_its_children(tiny_model: Path, artifacts: ArtifactStore) -> None:
    spawns = candidate(artifacts, build="import subprocess; subprocess.Popen(['sleep', '987'])")
    with HostClient(tiny_model, dtype="float32", threads=1, kv_bytes=KV_BYTES) as host:
        load(host, spawns)
        session = host.pid
        assert len(members(session)) >= 2
    deadline = time.monotonic() + 5
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(session)


def members(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
