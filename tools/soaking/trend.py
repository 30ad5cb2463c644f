"""Whether a resource grows: a regression line through samples, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

WARM_UP = 0.25
"""The share of a run that counts as warm-up: allocators, caches and thread pools reach their size."""

MIN_HOURS = 0.2
"""Shortest duration for a verdict, as some caches fill slowly."""

N_BLOCKS = 40
MIN_BLOCKS = 8
SIGMAS = 2.0
_MAX_CORRELATION = 0.95


class Verdict(StrEnum):
    """The verdict on a trend."""

    FLAT = "flat"
    GROWS = "grows"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Trend:
    """A regression line through samples.

    Attributes:
        per_hour: its slope.
        error_per_hour: standard error of the slope.
        hours: duration that the line covers, without the warm-up.
        last: mean of the last block.
    """

    per_hour: float
    error_per_hour: float
    hours: float
    last: float

    @property
    def bound_per_hour(self) -> float:
        """An upper bound of the slope: ``SIGMAS`` standard errors above it."""
        return self.per_hour + SIGMAS * self.error_per_hour

    def verdict(self, allowed: float) -> Verdict:
        """Whether the growth over the whole duration is below or above ``allowed``, by ``SIGMAS`` standard errors."""
        if self.hours < MIN_HOURS:
            return Verdict.UNDECIDED
        if self.bound_per_hour * self.hours <= allowed:
            return Verdict.FLAT
        certain = self.per_hour - SIGMAS * self.error_per_hour
        return Verdict.GROWS if certain * self.hours > allowed else Verdict.UNDECIDED


def fit(times_s: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Least squares over the means of blocks of equal duration, after the warm-up; None if there are too few samples.

    Consecutive samples of memory are correlated; means of blocks are less so. For the remaining correlation r of
    neighbouring residuals, the standard error is widened as if there were n (1 - r) / (1 + r) blocks (Bartlett 1935,
    for a first-order autoregression).

    Args:
        times_s: times of the samples in seconds from the start, ascending.
        values: the samples.
    """
    blocks = _block_means(np.asarray(times_s, np.float64) / 3600, np.asarray(values, np.float64))
    if blocks is None:
        return None
    hours, means = blocks
    from_middle = hours - hours.mean()
    spread = float(from_middle @ from_middle)
    slope = float(from_middle @ (means - means[0])) / spread
    residuals = np.round(means - means.mean() - slope * from_middle, 9)  # a constant has a slope of 0
    variance = float(residuals @ residuals) / (len(means) - 2)
    r = _correlation(residuals)
    error = math.sqrt(variance / spread * (1 + r) / (1 - r))
    return Trend(slope, error, float(hours[-1] - hours[0]), float(means[-1]))


def _block_means(hours: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...] | None:
    """The mean time and value of each block that has samples, [n_blocks] each."""
    late = hours >= WARM_UP * hours[-1] if len(hours) else np.zeros(0, bool)
    hours, values = hours[late], values[late]
    if len(hours) < MIN_BLOCKS:
        return None
    edges = np.linspace(hours[0], hours[-1], N_BLOCKS + 1)[1:-1]
    block = np.searchsorted(edges, hours, side="right")
    counts = np.bincount(block, minlength=N_BLOCKS)
    filled = counts > 0
    if filled.sum() < MIN_BLOCKS:
        return None
    sums = (np.bincount(block, weights, N_BLOCKS)[filled] for weights in (hours, values))
    mean_hours, mean_values = (total / counts[filled] for total in sums)
    return mean_hours, mean_values


def _correlation(residuals: NDArray[np.float64]) -> float:
    """The correlation of neighbouring residuals; negative values count as 0, which widens the error."""
    energy = float(residuals @ residuals)
    if energy == 0:
        return 0.0
    return min(max(float(residuals[1:] @ residuals[:-1]) / energy, 0.0), _MAX_CORRELATION)
