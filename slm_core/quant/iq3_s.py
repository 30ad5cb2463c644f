"""IQ3_S (ggml type 21): 256 weights, four at a time from a grid of 512 points, with signs; 3.4375 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, fields, scaled
from slm_core.quant._iq_tables import iq3_s_grid, signs_of_bytes

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("points", "u1", 64),  # low eight bits of a grid point, four weights each
        ("high_points", "u1", 8),  # ninth bit of eight points, lowest first
        ("signs", "u1", 32),  # bit i: weight i of eight is negative
        ("sub_scales", "u1", 4),  # of 32 weights each, low nibble first
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (2 sub_scale + 1) * point * sign``."""
    scales = as_float(blocks["scale"]) * (2 * fields(blocks["sub_scales"], 4).astype(np.float32) + 1)
    index = blocks["points"] | fields(blocks["high_points"], 1).astype(np.uint16) << 8
    points = iq3_s_grid()[index].reshape(-1, 32, 8) * signs_of_bytes(blocks["signs"])
    return scaled(scales, points)


FORMAT = QuantFormat(GgmlType.IQ3_S, BLOCK, expand)
