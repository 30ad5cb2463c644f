"""Q4_K: sub-blocks of 32, two of them in 32 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import f16, load, nibbles, packed_scales, u8

WIDTH = 32
PER_THREAD = 16
COLUMNS = tuple((64 * step, 64 * step + 32) for step in range(4))


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * sub_scale * q - min_scale * sub_min``."""
    scale, minimum = packed_scales(blocks + 4, P, mask)
    q = u8(blocks + 16 + P // 2 * 32 + j, mask) >> P % 2 * 4 & 15
    return f16(blocks, mask) * scale * q.to(tl.float32) - f16(blocks + 2, mask) * minimum


@triton.jit
def terms(blocks, S: tl.constexpr, j, mask):  # noqa: N803
    """Sub-blocks ``2 * S`` and ``2 * S + 1``."""
    low, high = nibbles(load(blocks + 16 + 32 * S + j, mask))
    scale, minimum = 128 * f16(blocks, mask), f16(blocks + 2, mask)
    low_scale, low_minimum = packed_scales(blocks + 4, 2 * S, mask)
    high_scale, high_minimum = packed_scales(blocks + 4, 2 * S + 1, mask)
    a, b = scale * low_scale, scale * high_scale
    return low, a, a + minimum * low_minimum, high, b, b + minimum * high_minimum
