"""Heads that have a matrix each, on the cpu tier: all of them in one call into C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slm_native.kernels.parameters import ByHead
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native import _native


class CpuByHead(ByHead):
    """Matrices in C++.

    Args:
        kernels: what computes.
        weights: of the heads [H].

    Attributes:
        weights: the same.
    """

    def __init__(self, kernels: _native.Kernels, weights: Sequence[_native.Weights]) -> None:
        super().__init__(len(weights))
        self._kernels = kernels
        self.weights = list(weights)

    def run(self, x: Array) -> Array:
        """Without the GIL."""
        y: Array = self._kernels.by_head(np.ascontiguousarray(x), self.weights)
        return y
