"""The matrix product all kernels use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b, summed in float32; b is widened to a's dtype. PRECISION is what `launch.precision` says of a."""
    if PRECISION == "ieee":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    else:
        b = b.to(a.dtype)
    return tl.dot(a, b, total, input_precision=PRECISION)
