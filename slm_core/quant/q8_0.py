"""Q8_0 (ggml type 8): 32 signed bytes, one scale; 8.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._fit import half_away, inverse
from slm_core.quant._format import SIGNED_ZERO, Affine, Blocks, affine_format, as_float, signed_codes

BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])


def split(blocks: Blocks) -> Affine:
    """``scale * q``."""
    return Affine(signed_codes(blocks["quants"])[:, None], as_float(blocks["scale"]), zero=SIGNED_ZERO)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """The weight of the largest magnitude gets the code 127 or -127; importance is ignored at this precision."""
    scale = np.abs(weights).max(axis=1) / np.float32(127)
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"] = scale
    blocks["quants"] = half_away(weights * inverse(scale)[:, None])
    return blocks


FORMAT = affine_format(GgmlType.Q8_0, BLOCK, split, encode)
