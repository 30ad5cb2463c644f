"""Q5_1 (ggml type 7): 32 weights of 5 bits, scale and minimum; 6 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, fields, pack_fields, pack_planes, planes
from slm_core.quant._small_blocks import above_minimum

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("minimum", "<f2"),
        ("high_bits", "u1", 4),  # bit i of the 32: fifth bit of weight i
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * q + minimum``."""
    q = planes(blocks["nibbles"], 4).reshape(-1, 32) | fields(blocks["high_bits"], 1) << np.uint8(4)
    return Affine(q[:, None], as_float(blocks["scale"]), minus=-as_float(blocks["minimum"]))


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """Codes span the range of the block; with importance, scale and minimum minimize the squared error."""
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"], blocks["minimum"], codes = above_minimum(weights, importance, 31)
    blocks["high_bits"] = pack_fields(codes >> np.uint8(4), 1)
    blocks["nibbles"] = pack_planes(codes.reshape(-1, 2, 16), 4)
    return blocks


FORMAT = affine_format(GgmlType.Q5_1, BLOCK, split, encode)
