"""A separate matrix for each head: the up-projections of latent attention."""

from __future__ import annotations

from collections.abc import Sequence

from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Linear, PerHead
from slm_native.kv import Array


class SteppedPerHead(PerHead):
    """One product after another, for any kernel set.

    Args:
        ops: the kernel set.
        linears: the matrix of each head [H].
    """

    def __init__(self, ops: Ops, linears: Sequence[Linear]) -> None:
        super().__init__(len(linears))
        self._ops = ops
        self._linears = linears

    def run(self, x: Array) -> Array:
        """Run the heads one by one."""
        products = [self._ops.linear(x[:, head] * 1, linear) for head, linear in enumerate(self._linears)]
        return self._ops.concatenated(products, axis=1).reshape(len(x), self.n_heads, -1)
