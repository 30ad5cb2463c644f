"""Q4_K: sub-blocks of 32, two of them in 32 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, six_bit_scales, u8

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * sub_scale * q - min_scale * sub_min``."""
    scale, minimum = six_bit_scales(blocks + 4, P, mask)
    q = u8(blocks + 16 + P // 2 * 32 + j, mask) >> P % 2 * 4 & 15
    return f16(blocks, mask) * scale * q.to(tl.float32) - f16(blocks + 2, mask) * minimum
