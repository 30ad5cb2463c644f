"""Q6_K (ggml type 14): 256 weights of 6 bits around zero in 16 sub-blocks of 16; 6.5625 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._fit import columns, extreme, fit_symmetric, inverse
from slm_core.quant._format import Affine, Blocks, affine_format, as_float, pack_planes, planes

BLOCK = np.dtype(
    [
        ("low_bits", "u1", (2, 64)),  # each 64 bytes hold 128 weights: low nibbles the first 64, high nibbles the rest
        ("high_bits", "u1", (2, 32)),  # each 32 bytes for 128 weights: bits 0-1 the first 32, bits 2-3 the next, ...
        ("sub_scales", "i1", 16),
        ("scale", "<f2"),
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale * sub_scale * (q - 32)``."""
    scales = as_float(blocks["scale"]) * blocks["sub_scales"].astype(np.float32)
    q = planes(blocks["low_bits"], 4).reshape(-1, 256) | planes(blocks["high_bits"], 2).reshape(-1, 256) << np.uint8(4)
    return Affine(q.reshape(-1, 16, 16), scales, zero=32)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """Scale of each sub-block, searched for least squared error, in which large weights count more."""
    groups = columns(weights.reshape(-1, 16))
    counts = np.square(groups) if importance is None else columns(importance.reshape(-1, 16))
    scales = fit_symmetric(groups, counts, 32).reshape(-1, 16)  # [N, 16]
    scale = (extreme(columns(scales)) / np.float32(-128)).astype(np.float16)
    sub_scales = np.clip(np.rint(scales * inverse(as_float(scale))), -128, 127)
    groups *= inverse((as_float(scale) * sub_scales).reshape(-1))
    codes = (np.clip(np.rint(groups), -32, 31) + 32).astype(np.uint8).T.reshape(-1, 2, 128)
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"], blocks["sub_scales"] = scale, sub_scales
    blocks["low_bits"] = pack_planes(codes.reshape(-1, 2, 2, 64), 4)
    blocks["high_bits"] = pack_planes((codes >> np.uint8(4)).reshape(-1, 2, 4, 32), 2)
    return blocks


FORMAT = affine_format(GgmlType.Q6_K, BLOCK, split, encode)
