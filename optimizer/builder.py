"""From a proposal's text to an artefact that a host can load: C++ is compiled here, in a process of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.artifacts import Artifact, ArtifactError, ArtifactStore, check_files, source_hash
from kernels.build import Compiler, compile_cpp, has_compiler, write_atomically
from optimizer.records import Candidate, Proposal

COMPILE_LIMIT_S = 60.0
LOG_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Built:
    """`artifact` is the candidate's, with its libraries when `failure` is empty and without them when it is not."""

    candidate: Candidate
    artifact: Artifact
    failure: str = ""
    kind: str = "python"  # settings | python | cpp_cached | cpp_fresh | compile | triton: what a swap to it had to do


class Builder:
    def __init__(self, data_dir: Path) -> None:
        self.artifacts = ArtifactStore(data_dir)
        self.out_dir = Path(data_dir).resolve() / "builds"

    def build(self, proposal: Proposal, run: Compiler | None = None) -> Built:
        """Compiles (with `run`, None: here and now) and stores. Raises ArtifactError for files that no candidate may have."""
        check_files(proposal.files)
        start = time.perf_counter()
        libraries: dict[str, Path] = {}
        failure, log, fresh = "", "", False
        for name, text in sorted(proposal.files.items()):
            if name.endswith(".cpp"):
                result = compile_cpp(
                    self._source(name, text), out_dir=self.out_dir, time_limit_s=COMPILE_LIMIT_S, run=run
                )
                log, fresh = log + result.log, fresh or not result.cached
                if result.path is None:
                    failure = f"{name} did not compile: {_first_error(result.log)}"
                    libraries.clear()
                    break
                libraries[name.removesuffix(".cpp")] = result.path
        artifact = self.store(proposal, libraries)
        candidate = describe(proposal, artifact, time.perf_counter() - start, log[-LOG_TAIL:])
        return Built(candidate, artifact, failure, _kind(proposal, libraries, fresh))

    def store(self, proposal: Proposal, libraries: Mapping[str, Path] | None = None) -> Artifact:
        return self.artifacts.put(
            proposal.files,
            name=proposal.name,
            libraries=libraries or {},
            parent=proposal.parent,
            focus=proposal.focus,
            hypothesis=proposal.hypothesis,
            mechanism=proposal.mechanism,
            settings=dict(proposal.settings),
            precision=proposal.precision,
            batch_invariant=proposal.batch_invariant,
            device=proposal.device,
        )

    def _source(self, name: str, text: str) -> Path:
        """The text as a file named by its content: a build's name follows from its source's."""
        folder = self.out_dir / "sources" / hashlib.sha256(text.encode()).hexdigest()[:24]
        path = folder / name
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        return path


def describe(proposal: Proposal, artifact: Artifact, build_s: float, log: str = "") -> Candidate:
    return Candidate(
        artifact_hash=artifact.hash,
        source_hash=artifact.source_hash,
        proposal_id=proposal.id,
        name=proposal.name,
        agent=proposal.agent,
        focus=proposal.focus,
        mechanism=proposal.mechanism,
        hypothesis=proposal.hypothesis,
        parent=proposal.parent,
        path=str(artifact.path),
        build_s=build_s,
        build_log=log,
    )


def content_hash(proposal: Proposal) -> str:
    """Names the very program: sources to the letter, and settings."""
    digest = hashlib.sha256()
    for part in [
        *(p for item in sorted(proposal.files.items()) for p in item),
        repr(sorted(proposal.settings.items())),
    ]:
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def mechanism_hash(proposal: Proposal) -> str:
    """Names the mechanism: the same for programs that differ in a number only."""
    return source_hash(proposal.files, proposal.settings)


def kinds_off() -> list[str]:
    """Kinds of candidate that this machine cannot build, as sentences."""
    if has_compiler():
        return []
    return [
        "No C++ compiler was found: C++ and torch.compile candidates are off. Install g++ or set CXX to turn them on."
    ]


def _kind(proposal: Proposal, libraries: Mapping[str, Path], fresh: bool) -> str:
    if libraries:
        return "cpp_fresh" if fresh else "cpp_cached"
    return proposal.mechanism if proposal.mechanism in ("settings", "compile", "triton") else "python"


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else "the compiler said nothing"
    )[:300]


__all__ = ["ArtifactError", "Builder", "Built", "content_hash", "describe", "kinds_off", "mechanism_hash"]
