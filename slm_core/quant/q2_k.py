"""Q2_K (ggml type 10): 256 weights of 2 bits in 16 sub-blocks of 16; 2.625 bits a weight."""

from __future__ import annotations

import numpy as np

from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, planes

BLOCK = np.dtype(
    [
        ("sub_scales", "u1", 16),  # sub-block i: scale in the low nibble, minimum in the high one
        ("quants", "u1", (2, 32)),  # each 32 bytes hold 128 weights: bits 0-1 the first 32, bits 2-3 the next, ...
        ("scale", "<f2"),
        ("min_scale", "<f2"),
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * sub_scale * q - min_scale * sub_min``."""
    scales = as_float(blocks["scale"]) * (blocks["sub_scales"] & 15).astype(np.float32)
    minimums = as_float(blocks["min_scale"]) * (blocks["sub_scales"] >> 4).astype(np.float32)
    return Affine(planes(blocks["quants"], 2).reshape(-1, 16, 16), scales, minus=minimums)


FORMAT = affine_format(GgmlType.Q2_K, BLOCK, split)
