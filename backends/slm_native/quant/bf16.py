"""BF16 (ggml type 30): the upper half of a float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat

BLOCK = np.dtype([("upper_half", "<u2")])


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """The weight, exactly: the lower half of the float32 is zero."""
    bits = blocks["upper_half"].astype(np.uint32)[:, None] << np.uint32(16)
    return bits.view(np.float32)


FORMAT = QuantFormat(GgmlType.BF16, BLOCK, expand)
