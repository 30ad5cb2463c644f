"""TQ2_0: two bits of 32 weights in a plane."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, u8

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * (q - 1)``."""
    q = u8(blocks + P // 4 * 32 + j, mask) >> P % 4 * 2 & 3
    return f16(blocks + 64, mask) * (q - 1).to(tl.float32)
