"""The sixteen uneven levels of IQ4_NL and IQ4_XS."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def level(q):
    """The level of a code, as float32. Levels plus 128 are bytes in four words."""
    word = tl.where(
        q < 8,
        tl.where(q < 4, 0x3F2D1801, 0x766A5D4F),
        tl.where(q < 12, 0xA6998D81 - (1 << 32), 0xF1D9C5B5 - (1 << 32)),
    )
    return ((word >> q % 4 * 8 & 255) - 128).to(tl.float32)
