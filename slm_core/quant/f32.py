"""F32 (ggml type 0): weights as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float

BLOCK = np.dtype([("weight", "<f4")])


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """The weight itself."""
    return as_float(blocks["weight"])


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """The weights as they are."""
    blocks = np.empty(len(weights), BLOCK)
    blocks["weight"] = weights[:, 0]
    return blocks


FORMAT = QuantFormat(GgmlType.F32, BLOCK, expand, encode=encode)
