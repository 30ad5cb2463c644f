"""IQ4_NL (ggml type 20): 32 weights of 4 bits that choose among 16 uneven levels, one scale; 4.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float, planes
from slm_native.quant._iq_tables import IQ4_LEVELS

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * level[q]``."""
    q = planes(blocks["nibbles"], 4).reshape(-1, 32)
    return as_float(blocks["scale"]) * IQ4_LEVELS[q]


FORMAT = QuantFormat(GgmlType.IQ4_NL, BLOCK, expand)
