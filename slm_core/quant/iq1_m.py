"""IQ1_M (ggml type 29): 256 weights, eight at a time from a ternary grid of 2048 points; 1.75 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float, fields, scaled
from slm_core.quant._iq_tables import IQ1_SHIFT, iq1_grid

BLOCK = np.dtype(
    [
        ("points", "u1", 32),  # low eight bits of a grid point, eight weights each
        ("high_points", "u1", 16),  # a nibble for a point: three upper bits, then the sign of the shift
        ("sub_scales", "<u2", 4),  # four three-bit sub-scales of 16 weights each; on top a quarter of the f16 scale
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (2 sub_scale + 1) * (point ± 1/8)``."""
    packed = blocks["sub_scales"]  # [N, 4]
    sub_scales = (packed[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    scales = as_float(_scale(packed)) * (2 * sub_scales.astype(np.float32) + 1)
    high = fields(blocks["high_points"], 4)  # [N, 32]
    shift = np.where(high >> 3, -IQ1_SHIFT, IQ1_SHIFT)
    points = iq1_grid()[blocks["points"] | (high & 7).astype(np.uint16) << 8] + shift[..., None]  # [N, 32, 8]
    return scaled(scales, points)


def _scale(packed: NDArray[np.uint16]) -> NDArray[np.float16]:
    """The block's f16, four bits of it on top of each word, lowest first: [N, 4] to [N]."""
    quarters = packed >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16)
    scale: NDArray[np.uint16] = np.bitwise_or.reduce(quarters, axis=1)
    return scale.view(np.float16)


FORMAT = QuantFormat(GgmlType.IQ1_M, BLOCK, expand)
