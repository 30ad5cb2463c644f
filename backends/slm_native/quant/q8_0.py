"""Q8_0 (ggml type 8): 32 signed bytes, one scale; 8.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float

BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * q``."""
    return as_float(blocks["scale"]) * blocks["quants"].astype(np.float32)


FORMAT = QuantFormat(GgmlType.Q8_0, BLOCK, expand)
