"""TQ2_0 (ggml type 35): 256 ternary weights of 2 bits, one scale; 2.0625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float, planes

BLOCK = np.dtype(
    [
        ("quants", "u1", (2, 32)),  # each 32 bytes hold 128 weights: bits 0-1 the first 32, bits 2-3 the next, ...
        ("scale", "<f2"),
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (q - 1)``."""
    q = planes(blocks["quants"], 2).reshape(-1, 256)
    return as_float(blocks["scale"]) * (q.astype(np.float32) - 1)


FORMAT = QuantFormat(GgmlType.TQ2_0, BLOCK, expand)
