"""F32: 32 numbers at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import load

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """The exact weights."""
    return load(blocks.to(tl.pointer_type(tl.float32)) + j, mask)
