"""A graph's inputs about positions: rotations, factors, and the attention bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec, ReadFactors, rope_kind, ropes_of, temperatures
from slm_onnx.ports import Kinds, rotation, sight, temperature


class Positions:
    """The position embeddings of a model's layers, as they hold in one context.

    Args:
        spec: the model.
        n_ctx: positions of the context, by which LongRoPE chooses its table.
        read_factors: reads a table of divisors from the file.

    Attributes:
        kind: keys of two contexts can be exchanged if this is the same.

    Raises:
        InvalidModelFile: the file's factors are no positive numbers.
    """

    def __init__(self, spec: ModelSpec, n_ctx: int, read_factors: ReadFactors) -> None:
        self._ropes = list(ropes_of(spec, n_ctx, read_factors).values())
        self._kinds = Kinds.of(spec)
        self._is_sloped = spec.alibi_max_bias is not None
        self.kind = rope_kind(spec, n_ctx)

    def inputs(
        self,
        positions: NDArray[np.int32],
        angles: NDArray[np.int64],
        distances: NDArray[np.int32] | None,
        dtype: np.dtype[Any],
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """The decoder's inputs, by name.

        Args:
            positions: of the batch's tokens [n].
            angles: where their keys are rotated to [n]; [n, 3], in time, height and width, where rows stand apart.
            distances: how far behind each token each cell lies [n, t]; below 0 where the token does not see it. None
                for a graph without a bias.
            dtype: of activations.
        """
        for kind, rope in enumerate(self._ropes):
            for name, table in zip(rotation(kind), rope.tables(angles), strict=True):
                yield name, table.astype(dtype, copy=False)
        for kind, spec in enumerate(self._kinds.temperatures):
            yield temperature(kind), temperatures(spec, positions).astype(dtype)[None, :, None]
        if distances is not None:
            yield from self._biases(distances, dtype)

    def _biases(self, distances: NDArray[np.int32], dtype: np.dtype[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
        hidden = np.finfo(dtype).min
        for kind, window in enumerate(self._kinds.windows):
            unseen = distances < 0
            if window is not None:
                unseen |= distances >= window
            yield sight(kind), np.where(unseen, hidden, dtype.type(0))[None, None]
        if self._is_sloped:
            yield "distances", distances.astype(dtype)[None, None]

    def turns(self, deltas: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The editor's inputs that move keys by ``deltas`` places [n], by name: float32 [1, n, R/2] each."""
        steps, which = np.unique(deltas, return_inverse=True)  # few: sines take longer than looking them up
        for kind, rope in enumerate(self._ropes):
            turned = steps[:, None] * rope.frequencies  # float64 [steps, R/2]
            for name, table in zip(rotation(kind), (np.cos(turned), np.sin(turned)), strict=True):
                yield name, table.astype(np.float32)[which][None]
