"""Loads of numbers from bytes of blocks, and conversions of bytes to float32.

On NVIDIA GPUs the conversions are PTX: four bytes of a register are masked at once, and one ``prmt`` for each builds a
float32 from the byte and a constant exponent. This takes 1.4 instructions per weight instead of 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

_TO_NEAR_ONE = """
    prmt.b32 {0}, {1}, 0x3F000000, 0x7044;
    prmt.b32 {2}, {1}, 0x3F000000, 0x7144;
    prmt.b32 {3}, {1}, 0x3F000000, 0x7244;
    prmt.b32 {4}, {1}, 0x3F000000, 0x7344;
"""
"""Bytes below 128, with their high bits set, to float32 ``1 + byte / 128``: byte 2 of the number is the byte."""


def _shifted(name: str, source: str, by: int) -> str:
    """PTX that shifts a register to the left, or to the right if ``by`` is negative."""
    return f"shl.b32 {name}, {source}, {by};" if by >= 0 else f"shr.u32 {name}, {source}, {-by};"


_LOW = _TO_NEAR_ONE.format("$0", "low", "$1", "$2", "$3")
_HIGH = _TO_NEAR_ONE.format("$4", "high", "$5", "$6", "$7")
_AND_OR = 0xEA
"""``lop3``'s code of ``(a & b) | c``."""
_NIBBLES = tl.constexpr(f"""{{
    .reg .b32 low, high;
    lop3.b32 low, $8, 0x0F0F0F0F, 0x80808080, {_AND_OR};
    shr.u32 high, $8, 4;
    lop3.b32 high, high, 0x0F0F0F0F, 0x80808080, {_AND_OR};
    {_LOW}{_HIGH}
}}""")
_FIFTH_BITS = tl.constexpr(
    tuple(
        f"""{{
    .reg .b32 low, high, bits;
    lop3.b32 low, $8, 0x0F0F0F0F, 0x80808080, {_AND_OR};
    shr.u32 high, $8, 4;
    lop3.b32 high, high, 0x0F0F0F0F, 0x80808080, {_AND_OR};
    {_shifted("bits", "$9", 4 - 2 * step)}
    lop3.b32 low, bits, 0x10101010, low, {_AND_OR};
    {_shifted("bits", "$9", 3 - 2 * step)}
    lop3.b32 high, bits, 0x10101010, high, {_AND_OR};
    {_LOW}{_HIGH}
}}"""
        for step in range(4)
    )
)
"""With bits ``2 * step`` and ``2 * step + 1`` of a second byte."""
_BYTES = tl.constexpr(tuple(f"prmt.b32 $0, $1, 0x4B000000, 0x744{k};" for k in range(4)))
"""Byte k of a word, as float32 ``2^23 + byte``."""


@triton.jit
def load(pointer, mask):
    """The numbers at ``pointer``; 0 where ``mask`` is false. Without a mask, all exist."""
    if mask is None:  # noqa: SIM108  (Triton compiles both sides of an expression)
        numbers = tl.load(pointer)
    else:
        numbers = tl.load(pointer, mask=mask, other=0)
    return numbers


_PTX = tl.constexpr(torch.version.hip is None and not isinstance(load, InterpretedFunction))
"""Whether kernels are compiled for an NVIDIA GPU."""


@triton.jit
def u8(pointer, mask):
    """Bytes, as int32."""
    return load(pointer, mask).to(tl.int32)


@triton.jit
def i8(pointer, mask):
    """Signed bytes, as float32."""
    return load(pointer.to(tl.pointer_type(tl.int8)), mask).to(tl.float32)


@triton.jit
def i32(pointer, mask):
    """Words at an address that is a multiple of 4."""
    return load(pointer.to(tl.pointer_type(tl.int32)), mask)


@triton.jit
def f16(pointer, mask):
    """Half precision at an even address, as float32."""
    return load(pointer.to(tl.pointer_type(tl.float16)), mask).to(tl.float32)


@triton.jit
def byte_of(word, K: tl.constexpr):  # noqa: N803  (Triton's custom for constants)
    """Byte ``K`` of a word, as float32."""
    if _PTX:
        x = tl.inline_asm_elementwise(_BYTES[K], "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1) - 8388608.0
    else:
        x = (word >> 8 * K & 255).to(tl.float32)
    return x


@triton.jit
def near_one(q):
    """``1 + q / 128``, float32."""
    return 1 + q.to(tl.float32) / 128


@triton.jit
def nibbles(packed):
    """``1 + q / 128`` for the low and the high nibbles of bytes, two float32 tensors."""
    if _PTX:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        q = packed.to(tl.int32)
        low, high = near_one(q & 15), near_one(q >> 4)
    return low, high


@triton.jit
def nibbles_and_fifth_bits(packed, bits, STEP: tl.constexpr):  # noqa: N803
    """Like ``nibbles``, with bits ``2 * STEP`` and ``2 * STEP + 1`` of ``bits`` as the nibbles' fifth bits."""
    if _PTX:
        low, high = tl.inline_asm_elementwise(
            _FIFTH_BITS[STEP],
            "=f,=f,=f,=f,=f,=f,=f,=f,r,r",
            [packed, bits],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        q, b = packed.to(tl.int32), bits.to(tl.int32) >> 2 * STEP
        low, high = near_one(q & 15 | (b & 1) << 4), near_one(q >> 4 | (b & 2) << 3)
    return low, high


@triton.jit
def packed_scales(sub_scales, P: tl.constexpr, mask):  # noqa: N803
    """Scale and minimum ``P`` of the eight of Q4_K and Q5_K, float32, read as words; see ``slm_core.quant``."""
    first, second, third = i32(sub_scales, mask), i32(sub_scales + 4, mask), i32(sub_scales + 8, mask)
    if P < 4:
        scales, minima = first & 0x3F3F3F3F, second & 0x3F3F3F3F
    else:
        scales = third & 0x0F0F0F0F | first >> 2 & 0x30303030
        minima = third >> 4 & 0x0F0F0F0F | second >> 2 & 0x30303030
    return byte_of(scales, P % 4), byte_of(minima, P % 4)
