"""IQ2_XS (ggml type 17): 256 weights, eight at a time from a grid of 512 points, with signs; 2.3125 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, fields, scaled
from slm_core.quant._iq_tables import iq2_xs_grid, signs_of_seven_bits

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("points", "<u2", 32),  # eight weights each: nine bits of grid point, on top seven sign bits
        ("sub_scales", "u1", 8),  # of 16 weights each, low nibble first
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    sub_scales = fields(blocks["sub_scales"], 4).astype(np.float32)
    scales = as_float(blocks["scale"]) * (sub_scales + np.float32(0.5)) * np.float32(0.25)
    signs = signs_of_seven_bits()[blocks["points"] >> 9]
    return scaled(scales, iq2_xs_grid()[blocks["points"] & 511] * signs)


FORMAT = QuantFormat(GgmlType.IQ2_XS, BLOCK, expand)
