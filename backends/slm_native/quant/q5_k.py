"""Q5_K (ggml type 13): 256 weights of 5 bits in 8 sub-blocks of 32; 5.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float, planes, six_bit_scales

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("min_scale", "<f2"),
        ("sub_scales", "u1", 12),  # eight six-bit scales and minimums, see six_bit_scales
        ("high_bits", "u1", 32),  # bit i of byte j: fifth bit of weight 32 i + j
        ("nibbles", "u1", (4, 32)),  # each 32 bytes hold two sub-blocks: low nibbles the first, high nibbles the second
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * sub_scale * q - min_scale * sub_min``."""
    sub_scales, sub_mins = six_bit_scales(blocks["sub_scales"])
    scales = as_float(blocks["scale"]) * sub_scales
    minimums = as_float(blocks["min_scale"]) * sub_mins
    q = planes(blocks["nibbles"], 4).reshape(-1, 8, 32) | planes(blocks["high_bits"], 1) << 4
    return (scales[..., None] * q.astype(np.float32) - minimums[..., None]).reshape(-1, 256)


FORMAT = QuantFormat(GgmlType.Q5_K, BLOCK, expand)
