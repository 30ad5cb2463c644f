"""Q3_K (ggml type 11): 256 weights of 3 bits around zero in 16 sub-blocks of 16; 3.4375 bits a weight."""

from __future__ import annotations

import numpy as np

from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, planes

BLOCK = np.dtype(
    [
        ("high_bits", "u1", 32),  # bit i of byte j: third bit of weight 32 i + j
        ("quants", "u1", (2, 32)),  # each 32 bytes hold 128 weights: bits 0-1 the first 32, bits 2-3 the next, ...
        ("low_scales", "u1", 8),  # low four bits of sub-scale i (low nibble) and i + 8 (high nibble)
        ("high_scales", "u1", 4),  # upper two bits of sub-scales i, i + 4, i + 8, i + 12, lowest first
        ("scale", "<f2"),
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * (sub_scale - 32) * (q - 4)``."""
    low = planes(blocks["low_scales"], 4).reshape(-1, 16)
    high = planes(blocks["high_scales"], 2).reshape(-1, 16)
    scales = as_float(blocks["scale"]) * ((low | high << 4).astype(np.float32) - 32)
    q = planes(blocks["quants"], 2).reshape(-1, 256) | planes(blocks["high_bits"], 1).reshape(-1, 256) << np.uint8(2)
    return Affine(q.reshape(-1, 16, 16), scales, zero=4)


FORMAT = affine_format(GgmlType.Q3_K, BLOCK, split)
