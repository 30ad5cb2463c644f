"""Shared code of Q4_0, Q4_1, Q5_0 and Q5_1: 32 weights with one scale, with a minimum or around zero.

Without importance, the scale maps the range of the block to the codes, like in ggml's reference quantizers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.quant._fit import Floats, columns, counted, fit_affine, fit_symmetric, inverse


def around_zero(weights: Floats, importance: Floats | None, half: int) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales float16 [N] and codes uint8 [N, 32]; the code ``half`` is zero."""
    if importance is None:
        farthest = np.abs(weights).argmax(axis=1, keepdims=True)
        scale = np.take_along_axis(weights, farthest, axis=1) / np.float32(-half)
        codes = weights * inverse(scale) + np.float32(half + 0.5)
    else:
        fitted = fit_symmetric(columns(weights), columns(counted(weights, importance)), half)
        scale = fitted.astype(np.float16)[:, None]
        codes = weights * inverse(scale.astype(np.float32)) + np.float32(half + 0.5)
    return scale[:, 0].astype(np.float16), np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def above_minimum(
    weights: Floats, importance: Floats | None, top: int
) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.uint8]]:
    """Scales and minimums, float16 [N] each, and codes uint8 [N, 32]."""
    if importance is None:
        minimum = weights.min(axis=1)
        scale = (weights.max(axis=1) - minimum) / np.float32(top)
        unit, lowest = scale, minimum
    else:
        scale, minus = fit_affine(columns(weights), columns(counted(weights, importance)), top)
        minimum = -minus
        unit, lowest = (part.astype(np.float16).astype(np.float32) for part in (scale, minimum))
    codes = (weights - lowest[:, None]) * inverse(unit)[:, None] + np.float32(0.5)
    return scale.astype(np.float16), minimum.astype(np.float16), np.clip(codes, 0, top).astype(np.uint8)
