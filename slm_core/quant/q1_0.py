"""Q1_0 (ggml type 41): 128 signs, one scale; 1.125 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._fit import columns, inverse
from slm_core.quant._format import (
    Affine,
    Blocks,
    affine_format,
    as_float,
    fields,
    pack_fields,
)

BLOCK = np.dtype(
    [
        ("scale", "<f2"),
        ("signs", "u1", 16),  # bit i of the 128: set if weight i is positive
    ]
)


def split(blocks: Blocks) -> Affine:
    """``scale`` if the bit is set, else ``-scale``: codes are 0 and 2 around 1."""
    return Affine(2 * fields(blocks["signs"], 1)[:, None], as_float(blocks["scale"]), zero=1)


def encode(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Blocks:
    """The scale is the mean magnitude, weighted by importance, which minimizes the squared error."""
    blocks = np.empty(len(weights), BLOCK)
    blocks["scale"] = _mean_magnitude(weights, importance)
    blocks["signs"] = pack_fields((weights >= 0).astype(np.uint8), 1)
    return blocks


def _mean_magnitude(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> NDArray[np.float32]:
    magnitudes = columns(np.abs(weights))
    plain: NDArray[np.float32] = magnitudes.sum(axis=0) / np.float32(
        len(magnitudes)
    )  # added one after the other, as ggml does
    if importance is None:
        return plain
    total = importance.sum(axis=1)
    weighted: NDArray[np.float32] = np.einsum("wn,nw->n", magnitudes, importance) * inverse(total)
    np.copyto(weighted, plain, where=total <= 0)
    return weighted


FORMAT = affine_format(GgmlType.Q1_0, BLOCK, split, encode)
