"""IQ4_XS (ggml type 23): 256 weights of 4 bits on 16 uneven levels, 8 sub-blocks of 32; 4.25 bits a weight."""

from __future__ import annotations

import numpy as np

from slm_core.gguf import GgmlType
from slm_core.quant._format import SIGNED_ZERO, Affine, Blocks, affine_format, as_float, fields, planes, signed_codes
from slm_core.quant._iq_tables import IQ4_LEVELS

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("high_scales", "u1", 2),  # upper two bits of the eight sub-scales, lowest first
        ("low_scales", "u1", 4),  # low four bits of sub-scale 2 i (low nibble) and 2 i + 1 (high nibble)
        ("nibbles", "u1", (8, 16)),  # one sub-block each: low nibbles the first 16 weights, high nibbles the rest
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * (sub_scale - 32) * level[q]``."""
    sub_scales = fields(blocks["low_scales"], 4) | fields(blocks["high_scales"], 2) << 4
    scales = as_float(blocks["scale"]) * (sub_scales.astype(np.float32) - 32)
    levels = IQ4_LEVELS[planes(blocks["nibbles"], 4).reshape(-1, 8, 32)]
    return Affine(signed_codes(levels), scales, zero=SIGNED_ZERO)


FORMAT = affine_format(GgmlType.IQ4_XS, BLOCK, split)
