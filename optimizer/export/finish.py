"""Finalists' sources, cleaned and built: what is verified, measured and given away is the very text a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.artifacts import ArtifactError
from kernels.registry import settled
from optimizer.agents.base import Tried
from optimizer.builder import Builder
from optimizer.export.clean_cpp import CleanError, clean_cpp
from optimizer.export.clean_python import clean_python
from optimizer.ledger import Ledger
from optimizer.records import Proposal

FINISHER = "finisher"  # the author of cleaned sources; no agent has this name


def cleaned(files: Mapping[str, str]) -> dict[str, str]:
    """The sources without dead branches, tuning numbers named. Raises SyntaxError or CleanError for broken text."""
    texts = clean_python(files)
    return {name: clean_cpp(settled(text)) if name.endswith((".cpp", ".h")) else text for name, text in texts.items()}


def finished(finalists: Iterable[Tried], builder: Builder, ledger: Ledger) -> list[Tried]:
    """Each finalist as its cleaned source, recorded as a candidate of its own; as it was where cleaning changes nothing."""
    return [_finished(tried, builder, ledger) for tried in finalists]


def _finished(tried: Tried, builder: Builder, ledger: Ledger) -> Tried:
    original = ledger.proposals[tried.candidate.proposal_id]
    try:
        files = cleaned(original.files)
        if files == original.files:
            return tried
        proposal = _proposal(original, files, tried)
        built = builder.build(proposal)
    except (SyntaxError, CleanError, ArtifactError) as error:
        return _as_it_was(tried, ledger, str(error))
    if built.failure:
        return _as_it_was(tried, ledger, built.failure)
    ledger.proposal(proposal)
    ledger.candidate(built.candidate, ok=True)
    return replace(tried, candidate=built.candidate)


def _proposal(original: Proposal, files: dict[str, str], tried: Tried) -> Proposal:
    parent = tried.candidate.artifact_hash
    return replace(original, id=f"{original.id}-final", agent=FINISHER, files=files, parent=parent)


def _as_it_was(tried: Tried, ledger: Ledger, why: str) -> Tried:
    ledger.log(f"{tried.candidate.name} goes on as it was written: its source could not be cleaned ({why}).", "warning")
    return tried
