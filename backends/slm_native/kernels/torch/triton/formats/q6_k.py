"""Q6_K: nibbles of 64 weights and two bits of 32, sub-scales of 16."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, i8, u8

WIDTH = 32


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * sub_scale * (q - 32)``."""
    low = u8(blocks + P // 4 * 64 + P % 2 * 32 + j, mask) >> P % 4 // 2 * 4 & 15
    high = u8(blocks + 128 + P // 4 * 32 + j, mask) >> P % 4 * 2 & 3
    scale = f16(blocks + 208, mask) * i8(blocks + 192 + 2 * P + j // 16, mask)
    return scale * ((low | high << 4) - 32).to(tl.float32)
