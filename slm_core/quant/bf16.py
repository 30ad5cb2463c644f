"""BF16 (ggml type 30): the upper half of a float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat

BLOCK = np.dtype([("upper_half", "<u2")])


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """The weight, exactly: the lower half of the float32 is zero."""
    bits = blocks["upper_half"].astype(np.uint32)[:, None] << np.uint32(16)
    return bits.view(np.float32)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """Rounded to the nearest, ties to even."""
    bits = weights.view(np.uint32)[:, 0]
    blocks = np.empty(len(weights), BLOCK)
    blocks["upper_half"] = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return blocks


FORMAT = QuantFormat(GgmlType.BF16, BLOCK, expand, encode=encode)
