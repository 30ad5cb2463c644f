"""Q5_K: as Q4_K, fifth bits in 32 bytes of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, six_bit_scales, u8

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * sub_scale * q - min_scale * sub_min``."""
    scale, minimum = six_bit_scales(blocks + 4, P, mask)
    high = u8(blocks + 16 + j, mask) >> P & 1
    q = u8(blocks + 48 + P // 2 * 32 + j, mask) >> P % 2 * 4 & 15 | high << 4
    return f16(blocks, mask) * scale * q.to(tl.float32) - f16(blocks + 2, mask) * minimum
