"""Q6_K (ggml type 14): 256 weights of 6 bits around zero in 16 sub-blocks of 16; 6.5625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float, planes, scaled

BLOCK = np.dtype(
    [
        ("low_bits", "u1", (2, 64)),  # each 64 bytes hold 128 weights: low nibbles the first 64, high nibbles the rest
        ("high_bits", "u1", (2, 32)),  # each 32 bytes for 128 weights: bits 0-1 the first 32, bits 2-3 the next, ...
        ("sub_scales", "i1", 16),
        ("scale", "<f2"),
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * sub_scale * (q - 32)``."""
    scales = as_float(blocks["scale"]) * blocks["sub_scales"].astype(np.float32)
    q = planes(blocks["low_bits"], 4).reshape(-1, 256) | planes(blocks["high_bits"], 2).reshape(-1, 256) << 4
    return scaled(scales, q.astype(np.float32) - 32)


FORMAT = QuantFormat(GgmlType.Q6_K, BLOCK, expand)
