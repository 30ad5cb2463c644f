"""MXFP4 (ggml type 39): 32 FP4 (E2M1) weights, one power-of-two scale (E8M0); 4.25 bits a weight.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import E2M1_DOUBLED, Blocks, QuantFormat, planes

BLOCK = np.dtype(
    [
        ("exponent", "u1"),  # scale 2 ** (exponent - 127)
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * e2m1(q)``; the scale is halved here because the table holds doubled values."""
    half_scale = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128)
    q = planes(blocks["nibbles"], 4).reshape(-1, 32)
    return half_scale[:, None] * E2M1_DOUBLED[q]


FORMAT = QuantFormat(GgmlType.MXFP4, BLOCK, expand)
