"""Q4_K (ggml type 12): 256 weights of 4 bits in 8 sub-blocks of 32; 4.5 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import (
    Affine,
    Blocks,
    affine_format,
    as_float,
    pack_planes,
    pack_six_bit_scales,
    planes,
    six_bit_scales,
)
from slm_core.quant._k_blocks import fit_k_blocks

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("min_scale", "<f2"),
        ("sub_scales", "u1", 12),  # eight six-bit scales and minimums, see six_bit_scales
        ("nibbles", "u1", (4, 32)),  # each 32 bytes hold two sub-blocks: low nibbles the first, high nibbles the second
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * sub_scale * q - min_scale * sub_min``."""
    sub_scales, sub_mins = six_bit_scales(blocks["sub_scales"])
    scales = as_float(blocks["scale"]) * sub_scales
    q = planes(blocks["nibbles"], 4).reshape(-1, 8, 32)
    return Affine(q, scales, minus=as_float(blocks["min_scale"]) * sub_mins)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """Scale and minimum of each sub-block, searched for least weighted squared error."""
    fitted = fit_k_blocks(weights, importance, 15)
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"], blocks["min_scale"] = fitted.scale, fitted.min_scale
    blocks["sub_scales"] = pack_six_bit_scales(fitted.sub_scales, fitted.sub_mins)
    blocks["nibbles"] = pack_planes(fitted.codes.reshape(-1, 4, 2, 32), 4)
    return blocks


FORMAT = affine_format(GgmlType.Q4_K, BLOCK, split, encode)
