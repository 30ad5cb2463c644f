"""NVFP4 (ggml type 40): 64 FP4 (E2M1) weights in 4 sub-blocks of 16, each with an unsigned FP8 (E4M3) scale.

4.5 bits a weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import E2M1_DOUBLED, SIGNED_ZERO, Affine, Blocks, affine_format, planes, signed_codes

BLOCK = np.dtype(
    [
        ("scales", "u1", 4),
        ("nibbles", "u1", (4, 8)),  # each 8 bytes hold 16 weights: low nibbles the first 8, high nibbles the rest
    ]
)


def _half_scales() -> NDArray[np.float32]:
    """Half of the value of every scale byte, [256]: 4 exponent bits (bias 7), 3 mantissa bits, the top bit unused."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = np.ldexp((8 + mantissa).astype(np.float32), exponent - 11)
    subnormal = np.ldexp(mantissa.astype(np.float32), -10)
    values = np.where(exponent == 0, subnormal, normal)
    values[0x7F] = 0  # not a number in E4M3; ggml reads it as zero
    return values


HALF_SCALES = _half_scales()


def split(blocks: Blocks) -> Affine:
    """``scale * e2m1(q)``; the scale is halved here because the table holds doubled values."""
    codes = signed_codes(E2M1_DOUBLED[planes(blocks["nibbles"], 4).reshape(-1, 4, 16)])
    return Affine(codes, HALF_SCALES[blocks["scales"]], zero=SIGNED_ZERO)


FORMAT = affine_format(GgmlType.NVFP4, BLOCK, split)
