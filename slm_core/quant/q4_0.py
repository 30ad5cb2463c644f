"""Q4_0 (ggml type 2): 32 weights of 4 bits around zero, one scale; 4.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, pack_planes, planes
from slm_core.quant._small_blocks import around_zero

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("nibbles", "u1", 16),  # byte j: weight j in the low nibble, weight j + 16 in the high one
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * (q - 8)``."""
    return Affine(planes(blocks["nibbles"], 4).reshape(-1, 1, 32), as_float(blocks["scale"]), zero=8)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """The weight of the largest magnitude gets the code 0; with importance, the scale minimizes the squared error."""
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"], codes = around_zero(weights, importance, 8)
    blocks["nibbles"] = pack_planes(codes.reshape(-1, 2, 16), 4)
    return blocks


FORMAT = affine_format(GgmlType.Q4_0, BLOCK, split, encode)
