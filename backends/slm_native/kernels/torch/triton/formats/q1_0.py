"""Q1_0: 128 signs."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, u8

WIDTH = 128


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale`` if the bit is set, else ``-scale``."""
    bit = u8(blocks + 2 + j // 8, mask) >> j % 8 & 1
    return f16(blocks, mask) * (2 * bit - 1).to(tl.float32)
