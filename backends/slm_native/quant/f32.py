"""F32 (ggml type 0): weights as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float

BLOCK = np.dtype([("weight", "<f4")])


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """The weight itself."""
    return as_float(blocks["weight"])


FORMAT = QuantFormat(GgmlType.F32, BLOCK, expand)
