"""A server whose version drafts gives, request for request, the answers of one that does not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.artifacts import Artifact, ArtifactStore
from tests.engine.test_api import GREEDY, completion, events, metric

LOOP = "to be or not to be, to be or not to be, to be or not"
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"max_tokens": 120},
    "several": {"n": 3, "temperature": 0.8, "seed": 4, "max_tokens": 30},
    "logprobs": {"logprobs": 2, "max_tokens": 20},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.7, "seed": 1, "max_tokens": 30},
    "bias": {"logit_bias": {"44": 100}, "max_tokens": 25},
    "ends at once": {"logit_bias": {"2": 100}, "ignore_eos": False, "max_tokens": 25},
    "ends at its least": {"logit_bias": {"2": 100}, "ignore_eos": False, "min_tokens": 6, "max_tokens": 25},
    "stop string": {"logit_bias": {"44": 100}, "stop": ["GGGG", "JJJ"], "max_tokens": 60},
    "echo": {"echo": True, "max_tokens": 10},
}


@pytest.fixture(scope="module")
def drafts(artifacts: ArtifactStore, baseline: Artifact) -> Artifact:
    return artifacts.put(baseline.files(), name="drafts", settings={"draft_tokens": 4})


def swap(http: httpx.Client, artifact: Artifact) -> None:
    body = {"artifact_hash": artifact.hash, "path": str(artifact.path), "policy": "drain", "deadline_s": 5}
    response = http.post("/internal/swap", json=body)
    assert response.status_code == 200, response.text


def answer(http: httpx.Client, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    answered = completion(http, prompt=LOOP, **body)
    choices = [
        (
            c["text"],
            c["finish_reason"],
            (c["logprobs"] or {}).get("tokens"),
            (c["logprobs"] or {}).get("token_logprobs"),
        )
        for c in answered["choices"]
    ]
    return choices, answered["usage"]


def streamed(http: httpx.Client) -> tuple[str, str]:
    """Text, and how the last chunk says that it ended. Tokens that come together share a chunk, so their number may differ."""
    chunks = events(http, "/v1/completions", prompt=LOOP, max_tokens=40)
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"]), chunks[-1]["choices"][0]["finish_reason"]


def test_answers_counts_and_ends_are_the_same_with_drafts(
    http: httpx.Client, baseline: Artifact, drafts: Artifact
) -> None:
    plain = {name: answer(http, body) for name, body in ASKED.items()}
    stream = streamed(http)
    assert metric(http, "drafted_tokens_total") == 0
    swap(http, drafts)
    for name, body in ASKED.items():
        (choices, usage), (expected, counts) = answer(http, body), plain[name]
        assert [c[:3] for c in choices] == [c[:3] for c in expected], name
        for (*_, ours), (*_, theirs) in zip(choices, expected, strict=True):
            assert ours == (theirs and pytest.approx(theirs, abs=1e-4)), name
        assert {k: usage[k] for k in usage if k.endswith("_tokens")} == {
            k: counts[k] for k in counts if k.endswith("_tokens")
        }, name
    assert streamed(http) == stream
    accepted, drafted = metric(http, "accepted_tokens_total"), metric(http, "drafted_tokens_total")
    assert 0 < accepted <= drafted
    status = http.get("/internal/status").json()
    assert (status["accepted_tokens"], status["drafted_tokens"]) == (accepted, drafted)


def test_a_client_that_leaves_ends_its_generation(http: httpx.Client, drafts: Artifact) -> None:
    swap(http, drafts)
    with http.stream(
        "POST", "/v1/completions", json={**GREEDY, "prompt": LOOP, "max_tokens": 400, "stream": True}
    ) as r:
        next(r.iter_bytes())
    while metric(http, "running") + metric(http, "waiting"):
        pass
    assert metric(http, "kv_blocks_free") == metric(http, "kv_blocks")
