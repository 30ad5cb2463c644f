"""Q8_0: 32 signed bytes, one scale."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, i8

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * q``."""
    return f16(blocks, mask) * i8(blocks + 2 + j, mask)
