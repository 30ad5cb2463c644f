"""Q4_1 (ggml type 3): 32 weights of 4 bits, scale and minimum; 5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, pack_planes, planes
from slm_core.quant._small_blocks import above_minimum

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("minimum", "<f2"),
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * q + minimum``."""
    q = planes(blocks["nibbles"], 4).reshape(-1, 1, 32)
    return Affine(q, as_float(blocks["scale"]), minus=-as_float(blocks["minimum"]))


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """Codes span the range of the block; with importance, scale and minimum minimize the squared error."""
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"], blocks["minimum"], codes = above_minimum(weights, importance, 15)
    blocks["nibbles"] = pack_planes(codes.reshape(-1, 2, 16), 4)
    return blocks


FORMAT = affine_format(GgmlType.Q4_1, BLOCK, split, encode)
