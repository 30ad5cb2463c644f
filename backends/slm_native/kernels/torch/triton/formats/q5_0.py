"""Q5_0: nibbles as in Q4_0, fifth bits in four bytes of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, u8

WIDTH = 16


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * (q - 16)``."""
    high = u8(blocks + 2 + 2 * P + j // 8, mask) >> j % 8 & 1
    q = u8(blocks + 6 + j, mask) >> 4 * P & 15 | high << 4
    return f16(blocks, mask) * (q - 16).to(tl.float32)
