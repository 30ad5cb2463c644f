"""IQ4_NL (ggml type 20): 32 weights of 4 bits that choose among 16 uneven levels, one scale; 4.5 bits a weight."""

from __future__ import annotations

import numpy as np

from slm_core.gguf import GgmlType
from slm_core.quant._format import SIGNED_ZERO, Affine, Blocks, affine_format, as_float, planes, signed_codes
from slm_core.quant._iq_tables import IQ4_LEVELS

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * level[q]``."""
    levels = IQ4_LEVELS[planes(blocks["nibbles"], 4).reshape(-1, 1, 32)]
    return Affine(signed_codes(levels), as_float(blocks["scale"]), zero=SIGNED_ZERO)


FORMAT = affine_format(GgmlType.IQ4_NL, BLOCK, split)
