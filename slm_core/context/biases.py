"""Attention biases of sequences: one number for each key, up to the last embedding row that has a bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held, bias_of
from slm_core.context.mrope import HeldBy
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED


def key_biases(held: Sequence[Held]) -> NDArray[np.float32]:
    """The attention bias of each key up to the last input that has a bias, float32 [n]."""
    biases = np.fromiter(map(bias_of, held), np.float32, len(held))
    return biases[: _end(biases)]


class AttentionBiases:
    """The attention biases of sequences. They are cached, and searched only after the first input with a bias.

    Args:
        held: the inputs of a sequence.
    """

    def __init__(self, held: HeldBy) -> None:
        self._held = held
        self._cache: dict[int, tuple[int, NDArray[np.float32]]] = {}  # by sequence: its length, and its biases
        self._in_use = False

    def of(self, batch: Batch) -> Mapping[int, NDArray[np.float32]]:
        """The biases of keys [n] by sequence, after a batch, without sequences that have none."""
        bias = batch.bias
        self._in_use = self._in_use or len(bias) > 0
        if not self._in_use:
            return {}
        batch_biases = np.zeros(len(batch), np.float32)
        if len(bias):
            batch_biases[batch.tokens == EMBEDDED] = bias
        biases = {}
        for seq_id in np.unique(batch.seq_ids).tolist():
            in_sequence = batch.seq_ids == seq_id
            first = int(batch.positions[in_sequence][0])
            before, added = self._before(seq_id, first), batch_biases[in_sequence]
            if added.any():
                before = np.concatenate([before, np.zeros(first - len(before), np.float32), added[: _end(added)]])
            self._cache[seq_id] = first + len(added), before
            if len(before):
                biases[seq_id] = before
        return biases

    def look_for(self, held: Sequence[Held]) -> None:
        """Search biases from now on if restored inputs have any. A replay calls ``of``, so it does not need this."""
        self._in_use = self._in_use or any(map(bias_of, held))

    def forget(self, seq_id: int) -> None:
        """Drop the cached biases of a sequence after an edit."""
        self._cache.pop(seq_id, None)

    def _before(self, seq_id: int, length: int) -> NDArray[np.float32]:
        """The biases of the first ``length`` inputs of a sequence."""
        cached = self._cache.get(seq_id)
        if cached is not None and cached[0] == length:
            return cached[1]
        return key_biases(self._held(seq_id)[:length])


def _end(biases: NDArray[np.float32]) -> int:
    """The number of biases up to the last one that is not 0."""
    nonzero = np.flatnonzero(biases)
    return int(nonzero[-1]) + 1 if len(nonzero) else 0
