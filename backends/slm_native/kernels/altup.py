"""Weights and operations of gemma3n's extra steps: residual streams (AltUp), LAuReL, per-layer embeddings.

Shapes: T tokens, E embedding width, N residual streams, P width of a per-layer embedding, R rank of LAuReL, L layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Linear, Norm
from slm_native.kv import Array


@dataclass(frozen=True, slots=True, eq=False)
class Laurel:
    """A learned augmented residual layer (Menghani et al. 2024, https://arxiv.org/abs/2411.07501)."""

    left: Linear  # (R, E)
    right: Linear  # (E, R)
    norm: Norm  # [E]


@dataclass(frozen=True, slots=True, eq=False)
class AltUp:
    """Alternating updates (Baykal et al. 2023, https://arxiv.org/abs/2301.13310) of one block.

    The block runs on one of N residual streams; the others are predicted before it and corrected by its output.
    """

    router: Linear  # (N, E)
    router_norm: Norm  # [E]
    predict: Linear  # (N*N, N)
    correct: Linear  # (N, N)
    scale: Array  # [E], on the block's stream before the per-layer embedding is added


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbedding:
    """The weights that add a per-layer embedding to a block's stream."""

    gate: Linear  # (P, E)
    project: Linear  # (E, P)
    norm: Norm  # [E]


class AltUpOps(Ops):
    """Operations of AltUp and of per-layer embeddings."""

    @abstractmethod
    def as_large(self, x: Array, like: Array) -> Array:
        """``x`` scaled so that its rows have the root mean square of the rows of ``like``; both [T, width].

        The mean square of ``x`` is at least 1e-5, as in gemma3n.
        """

    def add_shares(self, arrays: Sequence[Array], shares: Array) -> Sequence[Array]:
        """Each of N arrays [T, width] plus a weighted sum of all; weights are N columns of ``shares`` [T, N * N]."""
        n_streams, sums = len(arrays), []
        for i, total in enumerate(arrays):
            for j, other in enumerate(arrays):
                total = total + other * shares[:, i * n_streams + j : i * n_streams + j + 1]
            sums.append(total)
        return sums

    def split_layer_embeddings(
        self, projected: Array, looked_up: Array, norm: Norm, projected_share: float, looked_up_share: float
    ) -> Sequence[Array]:
        """The embedding [T, P] of each of L layers, from rows [T, L * P].

        It is ``norm(projected) * projected_share + looked_up * looked_up_share``.
        """
        width = norm.weight.shape[0]
        normed = self.normed(projected.reshape(-1, width), norm).reshape(projected.shape)
        rows = normed * projected_share + looked_up * looked_up_share
        return [rows[:, start : start + width] * 1 for start in range(0, rows.shape[1], width)]
