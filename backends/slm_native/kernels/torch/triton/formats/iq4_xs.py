"""IQ4_XS: sub-blocks of 32 with six-bit scales, nibbles as indices of uneven levels."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._iq4 import level
from slm_native.kernels.torch.triton.formats._loads import f16, u8

WIDTH = 16


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * (sub_scale - 32) * level[q]``; two parts make a sub-block."""
    low = u8(blocks + 4 + P // 4, mask) >> P // 2 % 2 * 4 & 15
    high = u8(blocks + 2 + P // 8, mask) >> P // 2 % 4 * 2 & 3
    q = u8(blocks + 8 + P // 2 * 16 + j, mask) >> P % 2 * 4 & 15
    return f16(blocks, mask) * ((low | high << 4) - 32).to(tl.float32) * level(q)
