"""Q5_0 (ggml type 6): 32 weights of 5 bits around zero, one scale; 5.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, fields, pack_fields, pack_planes, planes
from slm_core.quant._small_blocks import around_zero

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("high_bits", "u1", 4),  # bit i of the 32: fifth bit of weight i
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * (q - 16)``."""
    q = planes(blocks["nibbles"], 4).reshape(-1, 32) | fields(blocks["high_bits"], 1) << np.uint8(4)
    return Affine(q[:, None], as_float(blocks["scale"]), zero=16)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """The weight of the largest magnitude gets the code 0; with importance, the scale minimizes the squared error."""
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"], codes = around_zero(weights, importance, 16)
    blocks["high_bits"] = pack_fields(codes >> np.uint8(4), 1)
    blocks["nibbles"] = pack_planes(codes.reshape(-1, 2, 16), 4)
    return blocks


FORMAT = affine_format(GgmlType.Q5_0, BLOCK, split, encode)
