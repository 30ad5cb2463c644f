"""The position embeddings of a model's layers in one context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec, ReadFactors, Rope, rope_kind, ropes_of, temperatures
from slm_native.kernels import KernelSet, LayerPositions, Rotation
from slm_native.kv import Array


class Positions:
    """Rotates queries and keys, layer by layer.

    Args:
        spec: the model.
        n_ctx: positions of the context; LongRoPE chooses its table by it.
        read_factors: reads a table of divisors from the file; returns None if the file has none.
        kernels: the kernel set.
    """

    def __init__(
        self,
        spec: ModelSpec,
        n_ctx: int,
        read_factors: ReadFactors,
        kernels: KernelSet,
    ) -> None:
        self._kernels = kernels
        self._kind = rope_kind(spec, n_ctx)
        ropes = ropes_of(spec, n_ctx, read_factors)
        self._ropes = [None if layer.rope is None else ropes[layer.rope] for layer in spec.layers]
        # Layers with the same RoPE and temperature share one table per batch.
        kinds = [(rope, layer.temperature) for rope, layer in zip(self._ropes, spec.layers, strict=True)]
        self._distinct = list(dict.fromkeys(kinds))
        self._kinds = [self._distinct.index(kind) for kind in kinds]

    @property
    def kind(self) -> str:
        """The LongRoPE table of the keys. Contexts can exchange keys only if it is equal."""
        return self._kind

    def at(self, positions: NDArray[np.integer]) -> Sequence[LayerPositions]:
        """RoPE and temperature of each layer [L] for a batch, staged on the host until ``arrived``.

        Args:
            positions: position of each token [T]; for M-RoPE [T, 3]: time, height, width.
        """
        stage = self._kernels.stage
        rotations = {
            rope: _rotation(rope, *rope.tables(positions), stage)
            for rope in dict.fromkeys(self._ropes)
            if rope is not None
        }
        factors = {
            temperature: None if temperature is None else stage(temperatures(temperature, positions)[:, None, None])
            for temperature in dict.fromkeys(temperature for _, temperature in self._distinct)
        }
        distinct = [
            LayerPositions(None if rope is None else rotations[rope], factors[temperature])
            for rope, temperature in self._distinct
        ]
        return [distinct[kind] for kind in self._kinds]

    def move_keys(self, keys: Array, delta: int, blocks: Sequence[int]) -> Array:
        """Rotate keys [n, L, K, D] of some blocks [L] by ``delta`` more positions."""
        ropes, put = [self._ropes[block] for block in blocks], self._kernels.from_host
        moves = {
            rope: _rotation(rope, *rope.step_tables(delta, len(keys)), put)
            for rope in dict.fromkeys(ropes)
            if rope is not None
        }
        if len(moves) == 1 and None not in ropes:
            flat = keys.reshape(len(keys), -1, keys.shape[-1])
            return self._rotated(flat, *moves.values()).reshape(keys.shape)
        moved = keys * 1  # a copy
        for layer, rope in enumerate(ropes):
            if rope is not None:
                moved[:, layer] = self._rotated(keys[:, layer], moves[rope])
        return moved

    def _rotated(self, heads: Array, rotation: Rotation) -> Array:
        return self._kernels.rope(heads, rotation.cos, rotation.sin, rotation.style)


def _rotation(
    rope: Rope, cos: NDArray[np.float32], sin: NDArray[np.float32], put: Callable[[NDArray[Any]], Array]
) -> Rotation:
    return Rotation(put(cos), put(sin), rope.style)
