"""Q4_0: bytes of two nibbles, the low ones first."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, u8

WIDTH = 16


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * (q - 8)``."""
    q = u8(blocks + 2 + j, mask) >> 4 * P & 15
    return f16(blocks, mask) * (q - 8).to(tl.float32)
