"""The position embeddings of a model's layers, as they hold in one context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec, ReadFactors, Rope, rope_kind, ropes_of, temperatures
from slm_native.kernels import KernelSet, Rotation
from slm_native.kv import Array


class LayerPositions(NamedTuple):
    """What a layer does with the positions of a batch.

    Attributes:
        rotation: of queries and keys; None without RoPE.
        temperature: factor on queries, [T, 1, 1], or None.
    """

    rotation: Rotation | None
    temperature: Array | None


class Positions:
    """Rotates queries and keys, layer by layer.

    Args:
        spec: the model.
        n_ctx: positions of the context, by which LongRoPE chooses its table.
        read_factors: reads a table of divisors from the file; None if it has none.
        kernels: the arithmetic.
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
        # What differs from layer to layer, each once: a model of 28 layers that are alike does it once a batch.
        kinds = [(rope, layer.temperature) for rope, layer in zip(self._ropes, spec.layers, strict=True)]
        self._distinct = list(dict.fromkeys(kinds))
        self._kinds = [self._distinct.index(kind) for kind in kinds]

    @property
    def kind(self) -> str:
        """Contexts can exchange keys if this is equal: the table of LongRoPE that rotates them."""
        return self._kind

    def at(self, places: NDArray[np.integer]) -> Sequence[LayerPositions]:
        """What each layer [L] does to the heads of a batch, once it has ``arrived``.

        Args:
            places: where tokens stand [T]; [T, 3], in time, height and width, where every layer's rotation has these.
        """
        stage = self._kernels.stage
        rotations = {
            rope: _rotation(rope, *rope.tables(places), stage)
            for rope in dict.fromkeys(self._ropes)
            if rope is not None
        }
        factors = {
            temperature: None if temperature is None else stage(temperatures(temperature, places)[:, None, None])
            for temperature in dict.fromkeys(temperature for _, temperature in self._distinct)
        }
        each = [
            LayerPositions(None if rope is None else rotations[rope], factors[temperature])
            for rope, temperature in self._distinct
        ]
        return [each[kind] for kind in self._kinds]

    def move_keys(self, keys: Array, delta: int, blocks: Sequence[int]) -> Array:
        """Move keys [n, L, K, D] of some blocks [L] by ``delta`` positions, as if they had been rotated there."""
        ropes, put = [self._ropes[block] for block in blocks], self._kernels.from_host
        moves = {
            rope: _rotation(rope, *rope.step_tables(delta, len(keys)), put)
            for rope in dict.fromkeys(ropes)
            if rope is not None
        }
        if len(moves) == 1 and None not in ropes:
            flat = keys.reshape(len(keys), -1, keys.shape[-1])
            return self._turned(flat, *moves.values()).reshape(keys.shape)
        moved = keys * 1  # a copy
        for layer, rope in enumerate(ropes):
            if rope is not None:
                moved[:, layer] = self._turned(keys[:, layer], moves[rope])
        return moved

    def _turned(self, heads: Array, rotation: Rotation) -> Array:
        return self._kernels.rope(heads, rotation.cos, rotation.sin, rotation.style)


def _rotation(
    rope: Rope, cos: NDArray[np.float32], sin: NDArray[np.float32], put: Callable[[NDArray[Any]], Array]
) -> Rotation:
    return Rotation(put(cos), put(sin), rope.style)
