"""A device with round figures and a small model, so that times can be worked out by hand."""

from __future__ import annotations

from typing import Any

from kernels.hardware import Datasheet
from optimizer.cost.architecture import Architecture
from optimizer.cost.deployment import Deployment

DEVICE = Datasheet("round", "gpu", 1000, 1e14, 1e13, 2e14, None, 200, 80e9, "here")
# a layer: 1000 x (2 x 1000 + 2 x 500) around attention, 3 x 1000 x 4000 in the MLP
DENSE = Architecture("dense", 1000, 10, 50_000, heads=10, source="here", kv_heads=5, head_dim=100, intermediate=4000)
# the MLP of each layer is 16 experts of 3 x 1000 x 500, two for each token
SPARSE = Architecture(
    "sparse", 1000, 10, 50_000, heads=10, source="here", kv_heads=5, head_dim=100, experts=16, experts_per_token=2,
    expert_intermediate=500,
)  # fmt: skip


def deployment(**changes: Any) -> Deployment:
    fields = {"device": DEVICE, "model": DENSE, "framework": "vllm", "isl": 1000, "osl": 500, "concurrency": 10}
    return Deployment(**fields | changes)
