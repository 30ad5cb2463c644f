"""MXFP4 (ggml type 39): 32 FP4 (E2M1) weights, one power-of-two scale (E8M0); 4.25 bits a weight.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import numpy as np

from slm_core.gguf import GgmlType
from slm_core.quant._format import E2M1_DOUBLED, SIGNED_ZERO, Affine, Blocks, affine_format, planes, signed_codes

BLOCK = np.dtype(
    [
        ("exponent", "u1"),  # scale 2 ** (exponent - 127)
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * e2m1(q)``; the scale is halved here because the table holds doubled values."""
    half_scale = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128)
    codes = signed_codes(E2M1_DOUBLED[planes(blocks["nibbles"], 4).reshape(-1, 1, 32)])
    return Affine(codes, half_scale[:, None], zero=SIGNED_ZERO)


FORMAT = affine_format(GgmlType.MXFP4, BLOCK, split)
