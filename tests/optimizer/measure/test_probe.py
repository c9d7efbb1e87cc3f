"""The operator probe: all operators present, shares whole, values untouched."""

from __future__ import annotations

import pytest

from engine.artifacts import Artifact, ArtifactStore
from engine.client import HostClient
from optimizer.measure.probe import OPERATORS, operator_seconds, probe_artifact, shares
from optimizer.measure.rig import Rig
from optimizer.measure.tiers import Content
from optimizer.measure.values import same_bits

KV = 1 << 20


def test_every_operator_of_both_phases_has_a_share_and_they_add_up(
    host: HostClient, artifacts: ArtifactStore, baseline: Artifact
) -> None:
    content = Content(500, 1)
    found = operator_seconds(
        host, probe_artifact(artifacts, baseline), content.script(2, 20, 4), content.script(1, 20, 0), KV
    )
    assert list(found) == ["prefill", "decode"]
    for parts in found.values():
        assert set(parts) == set(OPERATORS)
        assert all(seconds > 0 for seconds in parts.values()), parts
    for parts in shares(found).values():
        assert sum(parts.values()) == pytest.approx(1.0)


def test_clocks_change_no_bit_of_the_baseline(host: HostClient, artifacts: ArtifactStore, baseline: Artifact) -> None:
    script = Content(500, 2).script(2, 20, 4)
    probe = Rig(host, probe_artifact(artifacts, baseline), kv_bytes=KV).play(script)
    plain = Rig(host, baseline, kv_bytes=KV).play(script)
    assert [same_bits(a, b) for a, b in zip(plain, probe, strict=True)] == [0, 0]


def test_shares_of_nothing_are_nothing() -> None:
    assert shares({"decode": {"attention": 0.0}}) == {"decode": {"attention": 0.0}}
    assert shares({}) == {}
