"""IQ1_S (ggml type 19): 256 weights, eight at a time from a ternary grid of 2048 points; 1.5625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, scaled
from slm_core.quant._iq_tables import IQ1_SHIFT, iq1_grid

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("points", "u1", (8, 4)),  # low eight bits of a grid point, eight weights each
        ("high_points", "<u2", 8),  # of 32 weights: upper three bits of four points, three of sub-scale, sign of shift
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (2 sub_scale + 1) * (point ± 1/8)``."""
    high = blocks["high_points"]  # [N, 8]
    scales = as_float(blocks["scale"]) * (2 * (high >> 12 & 7).astype(np.float32) + 1)
    shift = np.where(high >> 15, -IQ1_SHIFT, IQ1_SHIFT)
    index = blocks["points"] | (high[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7) << 8  # [N, 8, 4]
    return scaled(scales, iq1_grid()[index] + shift[..., None, None])


FORMAT = QuantFormat(GgmlType.IQ1_S, BLOCK, expand)
