"""Finalists go on as their cleaned source: recorded, built, named anew; what cannot be cleaned goes on as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.build import has_compiler
from optimizer.agents.base import Tried
from optimizer.agents.programs.program import Program
from optimizer.builder import Builder
from optimizer.config import RunConfig
from optimizer.export.finish import FINISHER, finished
from optimizer.file_store import FileStore
from optimizer.ledger import Ledger
from optimizer.records import Experiment, Proposal, State
from tests.optimizer.scripted import SMALL, proposal

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
DEAD = "import math\n\n\ndef unused():\n    return math.pi\n\n\ndef build(model, settings):\n    return model\n    print(1)\n"
CLEAN = "def build(model, settings):\n    return model\n"


class Run:
    def __init__(self, folder: Path) -> None:
        config = RunConfig("demo", SMALL.to_json(), str(folder))
        store = FileStore(folder)
        store.create(config.run_id, config.to_json())
        lease = store.claim(config.run_id, "worker", 60)
        assert lease
        self.logs: list[str] = []
        self.ledger = Ledger(config, store, lease, lambda kind, payload: self.logs.append(payload.get("text", "")))
        self.builder = Builder(folder)

    def finalist(self, p: Proposal) -> Tried:
        built = self.builder.build(p)
        self.ledger.proposal(p)
        self.ledger.candidate(built.candidate, ok=True)
        return Tried(built.candidate, Experiment("e", built.artifact.hash, 2, State.KEEP, "b", True, 1.4, 1.3, 1.5))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_finalist_is_what_a_person_reads(run: Run) -> None:
    tried = run.finalist(proposal("idea", {"forward.py": DEAD}))
    (final,) = finished([tried], run.builder, run.ledger)
    artifact = run.builder.artifacts.get(final.candidate.artifact_hash)
    assert artifact.files() == {"forward.py": CLEAN}
    assert final.candidate.parent == tried.candidate.artifact_hash != final.candidate.artifact_hash
    stored = run.ledger.store.load(run.ledger.config.run_id)
    assert FINISHER in {c.agent for c in stored.candidates} and final.candidate.proposal_id in {
        p.id for p in stored.proposals
    }


def test_what_is_clean_already_goes_on_as_it_is(run: Run) -> None:
    tried = run.finalist(proposal("idea", {"forward.py": CLEAN}))
    assert finished([tried], run.builder, run.ledger) == [tried]


def test_what_cannot_be_cleaned_goes_on_as_it_was_and_the_log_says_so(run: Run) -> None:
    tried = run.finalist(proposal("idea", {"forward.py": DEAD, "a.h": "int a;\n#endif\n"}))
    assert finished([tried], run.builder, run.ledger) == [tried]
    assert any("could not be cleaned" in line for line in run.logs)


@needs_compiler
def test_what_no_longer_compiles_goes_on_as_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = run.finalist(proposal("idea", {"forward.py": CLEAN, "a.cpp": "int a;\n"}, mechanism="cpp"))
    monkeypatch.setattr("optimizer.export.finish.clean_cpp", lambda text: "int a")
    assert finished([tried], run.builder, run.ledger) == [tried]
    assert any("did not compile" in line for line in run.logs)


@needs_compiler
def test_a_cleaned_kernel_has_the_same_machine_code(run: Run) -> None:
    program = Program.of(["small_linear"])
    p = proposal("small_linear", program.files(), mechanism="cpp")
    tried = run.finalist(p)
    (final,) = finished([tried], run.builder, run.ledger)
    before, after = (
        run.builder.artifacts.get(t.candidate.artifact_hash).library_paths["small_m_matmul"].read_bytes()
        for t in (tried, final)
    )
    assert final.candidate.artifact_hash != tried.candidate.artifact_hash
    assert before == after
