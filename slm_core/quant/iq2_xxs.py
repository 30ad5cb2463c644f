"""IQ2_XXS (ggml type 16): 256 weights, eight at a time from a grid of 256 points, with signs; 2.0625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, scaled
from slm_core.quant._iq_tables import iq2_xxs_grid, packed_signs

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        # One group for 32 weights: four grid points; in "signs" four times seven sign bits, lowest first, and on top
        # four bits of sub-scale.
        ("groups", [("points", "u1", 4), ("signs", "<u4")], 8),
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    signs = blocks["groups"]["signs"]  # [N, 8]
    scales = as_float(blocks["scale"]) * ((signs >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    points = iq2_xxs_grid()[blocks["groups"]["points"]]  # [N, 8, 4, 8]
    return scaled(scales, points * packed_signs(signs))


FORMAT = QuantFormat(GgmlType.IQ2_XXS, BLOCK, expand)
