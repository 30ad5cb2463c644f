"""IQ3_XXS (ggml type 18): 256 weights, four at a time from a grid of 256 points, with signs; 3.0625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, scaled
from slm_core.quant._iq_tables import iq3_xxs_grid, packed_signs

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("points", "u1", 64),  # four weights each
        ("signs", "<u4", 8),  # 32 weights each: four times seven sign bits, lowest first, on top four bits of sub-scale
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (sub_scale + 1/2) / 2 * point * sign``."""
    signs = blocks["signs"]
    scales = as_float(blocks["scale"]) * ((signs >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    points = iq3_xxs_grid()[blocks["points"]].reshape(-1, 8, 4, 8)
    return scaled(scales, points * packed_signs(signs))


FORMAT = QuantFormat(GgmlType.IQ3_XXS, BLOCK, expand)
