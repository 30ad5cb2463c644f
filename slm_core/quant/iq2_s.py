"""IQ2_S (ggml type 22): 256 weights, eight at a time from a grid of 1024 points, with signs; 2.5625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, fields, scaled
from slm_core.quant._iq_tables import iq2_s_grid, signs_of_bytes

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("points", "u1", 32),  # low eight bits of a grid point, eight weights each
        ("signs", "u1", 32),  # bit i: weight i of the eight is negative
        ("high_points", "u1", 8),  # upper two bits of four points, lowest first
        ("sub_scales", "u1", 8),  # of 16 weights each, low nibble first
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    sub_scales = fields(blocks["sub_scales"], 4).astype(np.float32)
    scales = as_float(blocks["scale"]) * (sub_scales + np.float32(0.5)) * np.float32(0.25)
    index = blocks["points"] | fields(blocks["high_points"], 2).astype(np.uint16) << 8
    return scaled(scales, iq2_s_grid()[index] * signs_of_bytes(blocks["signs"]))


FORMAT = QuantFormat(GgmlType.IQ2_S, BLOCK, expand)
