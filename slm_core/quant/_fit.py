"""Scales for groups of weights: grid searches over ranges, then least squares, like ggml's quantizers (ggml-quants.c).

Arrays are [W, N], with one group per column, so that sums over a group are sums of whole rows.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

_RANGES = np.arange(-2.4, 2.5, 0.4, dtype=np.float32)
"""The numbers of codes by which the range of a group is changed before rounding."""

_STEP_RANGES = np.arange(-0.9, 0.95, 0.1, dtype=np.float32)
"""The numbers of codes by which the range of a super-block's scales is changed before rounding."""

_FLAT = np.float32(1e-6)
"""Relative variance of codes below which their slope is float32 noise."""


def fit_affine(x: Floats, weight: Floats, top: int) -> tuple[Floats, Floats]:
    """Fit scale and minimum so that ``scale * code - minus`` is close to each group, with codes from 0 to ``top``.

    Args:
        x: float32 [W, N].
        weight: float32 [W, N], not negative: the weight of each squared error.
        top: the largest code.

    Returns:
        ``scale`` and ``minus``, float32 [N] each, not negative.
    """
    lowest = np.minimum(x.min(axis=0), 0)
    extent = x.max(axis=0) - lowest
    unit = (x - lowest) * inverse(extent)
    sums = _Sums(x, weight)
    best = _Best(extent / np.float32(top), -lowest)
    codes = np.empty_like(x)
    for extra in _RANGES:
        np.multiply(unit, top + extra, out=codes)
        np.rint(codes, out=codes)
        np.minimum(codes, top, out=codes)
        best.offer(*sums.line(codes))
    return best.scale, best.minus


def fit_symmetric(x: Floats, weight: Floats, half: int) -> Floats:
    """Fit a scale so that ``scale * code`` is close to each group, with codes from ``-half`` to ``half - 1``.

    Args:
        x: float32 [W, N].
        weight: float32 [W, N], not negative: the weight of each squared error.
        half: the number of negative codes.

    Returns:
        float32 [N], of either sign: the weight of the largest magnitude gets the code ``-half``.
    """
    farthest = extreme(x)
    unit = x * -inverse(farthest)
    weighted = weight * x
    scale = farthest / np.float32(-half)
    gain = np.zeros_like(scale)
    codes, squares = np.empty_like(x), np.empty_like(x)
    for extra in _RANGES:
        np.multiply(unit, half + extra, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -half, half - 1, out=codes)
        product = np.einsum("wn,wn->n", weighted, codes)
        np.multiply(codes, weight, out=squares)
        slope = product * inverse(np.einsum("wn,wn->n", squares, codes))
        better = product * slope > gain
        np.copyto(gain, product * slope, where=better)
        np.copyto(scale, slope, where=better)
    return scale


def fit_step(x: Floats, weight: Floats, top: int) -> Floats:
    """The unit in which non-negative values are closest to integers from 0 to ``top``.

    Args:
        x: float32 [W, N], not negative.
        weight: float32 [W, N], not negative: the weight of each squared error.
        top: the largest code.

    Returns:
        float32 [N], not negative.
    """
    highest = x.max(axis=0)
    units = x * inverse(highest) * (top + _STEP_RANGES)[:, None, None]
    codes = np.minimum(np.rint(units), top)  # [ranges, W, N]
    weighted = codes * weight
    slopes = (weighted * x).sum(axis=1) * inverse((weighted * codes).sum(axis=1))
    errors = (weight * np.square(x - slopes[:, None] * codes)).sum(axis=1)
    step: Floats = np.take_along_axis(slopes, errors.argmin(axis=0)[None], axis=0)[0]
    np.copyto(step, highest / np.float32(top), where=step <= 0)  # if all weights or all values are zero
    return step


def columns(groups: Floats) -> Floats:
    """Groups [N, W] as columns [W, N]."""
    return np.ascontiguousarray(groups.T)


def counted(weights: Floats, importance: Floats) -> Floats:
    """The weights of squared errors with an importance matrix: larger for large weights, which contribute more.

    Args:
        weights: float32 [N, W].
        importance: float32 [N, W]: mean squares of the inputs of the weights.

    Returns:
        float32 [N, W].
    """
    mean_square = np.square(weights).mean(axis=1, keepdims=True)
    counts: Floats = importance * np.sqrt(mean_square + np.square(weights))
    return counts


def extreme(x: Floats) -> Floats:
    """The element of the largest magnitude of each column, with its sign: [W, N] to [N]."""
    highest, lowest = x.max(axis=0), x.min(axis=0)
    farthest: Floats = np.where(highest >= -lowest, highest, lowest)
    return farthest


def inverse(x: Floats) -> Floats:
    """``1 / x``, or 0 if that is not finite; the caller silences warnings."""
    inverted = np.reciprocal(x)
    finite: Floats = np.where(np.isfinite(inverted), inverted, np.float32(0))
    return finite


def half_away(x: Floats) -> Floats:
    """Round to the nearest integer, halves away from zero, like C (NumPy rounds halves to even)."""
    magnitude = np.abs(x)
    integer = np.floor(magnitude)
    integer += magnitude - integer >= np.float32(0.5)
    rounded: Floats = np.copysign(integer, x)
    return rounded


class _Sums:
    """Weighted least squares of ``x`` on codes, column by column."""

    def __init__(self, x: Floats, weight: Floats) -> None:
        self.weight = weight
        self.weighted = weight * x
        self.w = weight.sum(axis=0)
        self.x = self.weighted.sum(axis=0)
        self._squares = np.empty_like(x)

    def line(self, codes: Floats) -> tuple[Floats, Floats, Floats]:
        """Slope, minimum (not negative), and the reduction of the squared error compared with zeros."""
        np.multiply(codes, self.weight, out=self._squares)
        q = self._squares.sum(axis=0)
        qq = np.einsum("wn,wn->n", self._squares, codes)
        xq = np.einsum("wn,wn->n", self.weighted, codes)
        determinant = self.w * qq - q * q
        flat = determinant <= _FLAT * self.w * qq
        by_determinant = inverse(determinant)
        slope = (self.w * xq - self.x * q) * by_determinant
        minus = (q * xq - qq * self.x) * by_determinant
        through_zero = minus <= 0
        slope = np.where(through_zero, np.maximum(xq * inverse(qq), 0), slope)
        minus = np.where(through_zero, np.float32(0), minus)
        gain = slope * xq - minus * self.x
        return slope, minus, np.where(flat, -np.inf, gain)


class _Best:
    """The best fit of each group so far."""

    def __init__(self, scale: Floats, minus: Floats) -> None:
        self.scale, self.minus = scale, minus
        self._gain = np.full_like(scale, -np.inf)

    def offer(self, scale: Floats, minus: Floats, gain: Floats) -> None:
        better = gain > self._gain
        for best, candidate in ((self._gain, gain), (self.scale, scale), (self.minus, minus)):
            np.copyto(best, candidate, where=better)
