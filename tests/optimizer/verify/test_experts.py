"""Verification of models with experts: an expert's share of a step depends on what the others in it say, and bits with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.models.config import read_config
from optimizer.records import Verdict
from optimizer.verify import contamination, controls, serving
from optimizer.verify.faults import CONTROLS
from optimizer.verify.runner import Verifier
from tests.contracts.family_contract import write_family
from tests.optimizer.verify.test_runner import CLOCKED

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
}
THREADS = 2  # two share out an expert's rows, and few of them otherwise than many


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_family(path, request.param, FAMILIES[request.param])
    return path


@pytest.fixture
def verifier(folder: Path, artifacts: ArtifactStore, tmp_path: Path) -> Verifier:
    config = read_config(folder)
    text = tuple(np.random.default_rng(3).integers(0, config.vocab_size, 4000).tolist())
    baseline = artifacts.baseline(config)
    return Verifier(folder, config, "float32", THREADS, baseline, artifacts, text, tmp_path, floor_s=1e-9)


def candidate(verifier: Verifier) -> Artifact:
    baseline = verifier.baseline
    return verifier.artifacts.put(baseline.files(), name="twin", settings=dict(baseline.manifest.settings))


def test_the_baselines_own_program_is_verified_in_float32(verifier: Verifier) -> None:
    checks = verifier.verify(candidate(verifier))
    assert [c for c in checks if c.verdict is not Verdict.PASS and c.check not in CLOCKED] == []
    assert {c.check for c in checks} == set(CONTROLS) - {"exactness"}


def test_each_check_of_neighbours_catches_its_planted_fault(verifier: Verifier) -> None:
    names = [*contamination.CHECKS, *serving.CHECKS, "crowded experts"]
    assert controls.run(verifier, names) == dict.fromkeys(names, True)


def test_experts_that_turn_rows_away_are_seen_with_the_models_own_routing_alone(verifier: Verifier) -> None:
    fault = CONTROLS["crowded experts"].store(verifier.artifacts, verifier.baseline)
    checks = {c.check: c.verdict for c in verifier.verify(fault) if c.check in ("neighbours", "crowded experts")}
    assert checks == {"neighbours": Verdict.PASS, "crowded experts": Verdict.FAIL}


def test_a_sixteen_bit_model_is_verified_too(verifier: Verifier) -> None:
    half = replace(verifier, dtype="bfloat16")
    checks = half.verify(candidate(half))
    assert [c for c in checks if c.verdict is not Verdict.PASS and c.check not in CLOCKED] == []
