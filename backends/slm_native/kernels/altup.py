"""What gemma3n has around its layers: residual streams (AltUp), LAuReL, and embeddings of each layer.

Shapes: T tokens, E embedding width, N residual streams, P width of a layer's own embedding, R rank of LAuReL, L layers.
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

    The block runs on one of N streams; the others are predicted before it, and corrected by its output.
    """

    router: Linear  # (N, E)
    router_norm: Norm  # [E]
    predict: Linear  # (N*N, N)
    correct: Linear  # (N, N)
    scale: Array  # [E], on the block's stream before its own embedding is let in


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbedding:
    """How a block lets its own embedding of a token in."""

    gate: Linear  # (P, E)
    project: Linear  # (E, P)
    norm: Norm  # [E]


class AltUpOps(Ops):
    """Operations of AltUp and of layers' own embeddings."""

    @abstractmethod
    def as_large(self, x: Array, like: Array) -> Array:
        """``x`` scaled so that its rows have the root mean square of the rows of ``like``; both [T, width].

        The mean square of ``x`` is taken to be 1e-5 at least, as in gemma3n.
        """

    def mixed(self, arrays: Sequence[Array], shares: Array) -> Sequence[Array]:
        """Each of N arrays [T, width] and the sum of all times its N columns of ``shares`` [T, N * N]."""
        n_streams, mixed = len(arrays), []
        for i, each in enumerate(arrays):
            for j, other in enumerate(arrays):
                each = each + other * shares[:, i * n_streams + j : i * n_streams + j + 1]
            mixed.append(each)
        return mixed

    def part_embeddings(
        self, projected: Array, looked_up: Array, norm: Norm, projected_share: float, looked_up_share: float
    ) -> Sequence[Array]:
        """Each part [T, P] of rows [T, L*P]: what is made, normalized, times its share, and what is given times its."""
        width = norm.weight.shape[0]
        normed = self.normed(projected.reshape(-1, width), norm).reshape(projected.shape)
        mixed = normed * projected_share + looked_up * looked_up_share
        return [mixed[:, start : start + width] * 1 for start in range(0, mixed.shape[1], width)]
