"""BF16: 32 numbers at a time."""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """The exact weights."""
    return tl.load(blocks.to(tl.pointer_type(tl.bfloat16)) + j, mask=mask, other=0.0).to(tl.float32)
