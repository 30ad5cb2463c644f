"""MXFP4: nibbles as in Q4_0, one power of two."""

from __future__ import annotations

import triton
import triton.language as tl

from slm_native.kernels.torch.triton.formats._loads import u8

WIDTH = 16


@triton.jit
def part(blocks, P: tl.constexpr, j, mask):  # noqa: N803  (Triton's custom for constants)
    """``scale * e2m1(q)``: two bits of exponent, one of mantissa, one of sign."""
    q = u8(blocks + 1 + j, mask) >> 4 * P & 15
    exponent, mantissa = q >> 1 & 3, q & 1
    doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << exponent >> 1)
    signed = tl.where(q > 7, -doubled, doubled).to(tl.float32)
    power = u8(blocks, mask)  # half of 2 ** (power - 127), subnormal below 2
    bits = tl.where(power < 2, 0x200000 << (power & 1), power - 1 << 23)
    return bits.to(tl.float32, bitcast=True) * signed
