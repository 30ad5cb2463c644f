"""Heads that have a matrix each: the up-projections of latent attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slm_native.kernels.parameters import Linear
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native.kernels.kernelset import KernelSet


class ByHead(ABC):
    """A matrix for each head, prepared. Nothing that a run changes, so threads may share it.

    Args:
        n_heads: H.
    """

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    @abstractmethod
    def run(self, x: Array) -> Array:
        """Each head's rows of [T, H, in] through its own matrix: [T, H, out]."""


class SteppedByHead(ByHead):
    """The products of any kernel set one by one.

    Args:
        kernels: the arithmetic.
        linears: of the heads [H].
    """

    def __init__(self, kernels: KernelSet, linears: Sequence[Linear]) -> None:
        super().__init__(len(linears))
        self._kernels = kernels
        self._linears = linears

    def run(self, x: Array) -> Array:
        """Each head after the other."""
        made = [self._kernels.linear(x[:, head] * 1, linear) for head, linear in enumerate(self._linears)]
        return self._kernels.concatenated(made, axis=1).reshape(len(x), self.n_heads, -1)
