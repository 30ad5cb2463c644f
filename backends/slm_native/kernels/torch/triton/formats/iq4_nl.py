"""IQ4_NL: nibbles as in Q4_0, as indices of uneven levels."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._iq4 import level
from slm_native.kernels.torch.triton.formats._loads import f16, u8

WIDTH = 16


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * level[q]``."""
    return f16(blocks, mask) * level(u8(blocks + 2 + j, mask) >> 4 * P & 15)
