"""Q4_0 (ggml type 2): 32 weights of 4 bits around zero, one scale; 4.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float, planes

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (q - 8)``."""
    q = planes(blocks["nibbles"], 4).reshape(-1, 32)
    return as_float(blocks["scale"]) * (q.astype(np.float32) - 8)


FORMAT = QuantFormat(GgmlType.Q4_0, BLOCK, expand)
