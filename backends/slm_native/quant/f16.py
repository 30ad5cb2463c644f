"""F16 (ggml type 1): IEEE half precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_native.quant._format import Blocks, QuantFormat, as_float

BLOCK = np.dtype([("weight", "<f2")])


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """The weight, exactly."""
    return as_float(blocks["weight"])


FORMAT = QuantFormat(GgmlType.F16, BLOCK, expand)
