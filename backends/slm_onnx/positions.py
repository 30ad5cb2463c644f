"""Inputs that depend on positions: RoPE tables, query factors, attention bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec, ReadFactors, rope_kind, ropes_of, temperatures
from slm_onnx.ports import Kinds, attention_bias, rotation, temperature


class Positions:
    """The position embeddings of a model's layers in one context.

    Args:
        spec: the model's architecture and sizes.
        n_ctx: positions of the context; LongRoPE chooses its table by it.
        read_factors: reads a table of divisors from the file.

    Attributes:
        kind: the LongRoPE table of the keys. Contexts can exchange keys only if it is equal.

    Raises:
        InvalidModelFile: a RoPE factor in the file is not a positive number.
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
        biases: NDArray[np.float32] | None = None,
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """The decoder's inputs, by name.

        Args:
            positions: positions of the tokens [n].
            angles: rotations of their keys [n]; for M-RoPE [n, 3]: time, height, width.
            distances: distance from each cell to each token [n, t]; negative if the token does not attend to it. None
                for a graph without a bias.
            dtype: dtype of activations.
            biases: the attention bias of each cell for each token [n, t]; None for none.
        """
        for kind, rope in enumerate(self._ropes):
            for name, table in zip(rotation(kind), rope.tables(angles), strict=True):
                yield name, table.astype(dtype, copy=False)
        for kind, spec in enumerate(self._kinds.temperatures):
            yield temperature(kind), temperatures(spec, positions).astype(dtype)[None, :, None]
        if distances is not None:
            yield from self._biases(distances, dtype, biases)

    def _biases(
        self, distances: NDArray[np.int32], dtype: np.dtype[Any], biases: NDArray[np.float32] | None
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        hidden = np.finfo(dtype).min
        visible = dtype.type(0) if biases is None else np.maximum(biases, hidden)  # -inf hides a cell, too
        for kind, window in enumerate(self._kinds.windows):
            unseen = distances < 0
            if window is not None:
                unseen |= distances >= window
            yield attention_bias(kind), np.where(unseen, hidden, visible)[None, None]
        if self._is_sloped:
            yield "distances", distances.astype(dtype)[None, None]

    def turns(self, deltas: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The editor's inputs for rotations by ``deltas`` M-RoPE positions [n], by name: float32 [1, n, R/2] each."""
        steps, which = np.unique(deltas, return_inverse=True)  # few distinct ones: a look-up is faster than a sine
        for kind, rope in enumerate(self._ropes):
            angles = steps[:, None] * rope.frequencies  # float64 [steps, R/2]
            for name, table in zip(rotation(kind), (np.cos(angles), np.sin(angles)), strict=True):
                yield name, table.astype(np.float32)[which][None]
