"""TQ2_0 (ggml type 35): 256 ternary weights of 2 bits, one scale; 2.0625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._fit import half_away, inverse
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, pack_planes, planes

BLOCK = np.dtype(
    [
        ("quants", "u1", (2, 32)),  # each 32 bytes hold 128 weights: bits 0-1 the first 32, bits 2-3 the next, ...
        ("scale", "<f2"),
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * (q - 1)``."""
    return Affine(planes(blocks["quants"], 2).reshape(-1, 1, 256), as_float(blocks["scale"]), zero=1)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """The scale is the largest magnitude, which is exact for ternary weights; importance is ignored."""
    scale = np.abs(weights).max(axis=1)
    codes = (half_away(weights * inverse(scale)[:, None]) + 1).astype(np.uint8)
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"] = scale
    blocks["quants"] = pack_planes(codes.reshape(-1, 2, 4, 32), 2)
    return blocks


FORMAT = affine_format(GgmlType.TQ2_0, BLOCK, split, encode)
