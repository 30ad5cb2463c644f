"""Shared code of Q4_K and Q5_K: super-blocks of eight groups of 32 weights, with six-bit scales and minimums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.quant._fit import Floats, columns, fit_affine, fit_step, inverse

_TOP = 63


@dataclass(frozen=True, slots=True)
class KBlocks:
    """Unpacked super-blocks.

    Attributes:
        scale: float16 [N], the unit of the scales.
        min_scale: float16 [N], the unit of the minimums.
        sub_scales: uint8 [N, 8], 0 to 63.
        sub_mins: uint8 [N, 8], 0 to 63.
        codes: uint8 [N, 8, 32].
    """

    scale: NDArray[np.float16]
    min_scale: NDArray[np.float16]
    sub_scales: NDArray[np.uint8]
    sub_mins: NDArray[np.uint8]
    codes: NDArray[np.uint8]


def fit_k_blocks(weights: Floats, importance: Floats | None, top: int) -> KBlocks:
    """Fit scale and minimum of each group, then their units, then round the weights.

    Args:
        weights: float32 [N, 256].
        importance: float32 [N, 256] or None.
        top: the largest code.
    """
    groups = columns(weights.reshape(-1, 32))
    counts = columns(_counts(weights, importance))
    scales, minimums = fit_affine(groups, counts, top)
    group_counts = counts.sum(axis=0)
    scale, sub_scales, scales = _in_units(scales, group_counts)
    min_scale, sub_mins, minimums = _in_units(minimums, group_counts)
    groups += minimums
    groups *= inverse(scales)
    codes = np.clip(np.rint(groups), 0, top).astype(np.uint8)
    return KBlocks(scale, min_scale, sub_scales, sub_mins, codes.T.reshape(-1, 8, 32))


def _counts(weights: Floats, importance: Floats | None) -> Floats:
    """The weights of squared errors: larger for weights that are large in their group or super-block."""
    groups = weights.reshape(-1, 32)
    if importance is None:
        counts: Floats = np.abs(groups) + np.sqrt(np.square(groups).mean(axis=1, keepdims=True))
        return counts
    mean_square = np.square(weights).mean(axis=1, keepdims=True)
    counts = importance * np.sqrt(2 * mean_square + np.square(weights))
    return counts.reshape(-1, 32)


def _in_units(values: Floats, counts: Floats) -> tuple[NDArray[np.float16], NDArray[np.uint8], Floats]:
    """The unit of each super-block's eight values, the values in units, and the rounded values."""
    eights = columns(values.reshape(-1, 8))
    unit = fit_step(eights, columns(counts.reshape(-1, 8)), _TOP).astype(np.float16)
    codes = np.clip(np.rint(eights * inverse(unit.astype(np.float32))), 0, _TOP)
    amounts: Floats = columns(codes * unit.astype(np.float32)).reshape(-1)
    return unit, columns(codes).astype(np.uint8), amounts
