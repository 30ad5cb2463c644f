"""Loads of numbers from bytes of blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def u8(pointer, mask):
    """Bytes, as int32."""
    return tl.load(pointer, mask=mask, other=0).to(tl.int32)


@triton.jit
def i8(pointer, mask):
    """Signed bytes, as float32."""
    return tl.load(pointer.to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.float32)


@triton.jit
def f16(pointer, mask):
    """Half precision at an even address, as float32."""
    return tl.load(pointer.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def six_bit_scales(sub_scales, P: tl.constexpr, mask):  # noqa: N803  (Triton's custom for constants)
    """Scale and minimum ``P`` of the eight of Q4_K and Q5_K, float32; see ``slm_core.quant``."""
    if P < 4:
        scale = u8(sub_scales + P, mask) & 63
        minimum = u8(sub_scales + P + 4, mask) & 63
    else:
        rest = u8(sub_scales + P + 4, mask)
        scale = (rest & 15) | (u8(sub_scales + P - 4, mask) >> 6 << 4)
        minimum = (rest >> 4) | (u8(sub_scales + P, mask) >> 6 << 4)
    return scale.to(tl.float32), minimum.to(tl.float32)
