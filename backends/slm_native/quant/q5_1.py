"""Q5_1 (ggml type 7): 32 weights of 5 bits, scale and minimum; 6 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float, fields, planes

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("minimum", "<f2"),
        ("high_bits", "u1", 4),  # bit i of the 32: fifth bit of weight i
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * q + minimum``."""
    q = planes(blocks["nibbles"], 4).reshape(-1, 32) | fields(blocks["high_bits"], 1) << 4
    return as_float(blocks["scale"]) * q.astype(np.float32) + as_float(blocks["minimum"])


FORMAT = QuantFormat(GgmlType.Q5_1, BLOCK, expand)
