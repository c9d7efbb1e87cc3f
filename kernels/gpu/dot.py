"""The matrix product all kernels use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b, summed in float32. PRECISION is what `launch.precision` says of the inputs."""
    if PRECISION == "ieee":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)
