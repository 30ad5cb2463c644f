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
    """The attention bias of each key, float32 [n]: of the inputs up to the last one that has a bias."""
    biases = np.fromiter(map(bias_of, held), np.float32, len(held))
    return biases[: _end(biases)]


class AttentionBiases:
    """The attention biases of sequences. They are cached, and looked for only after the first input with a bias.

    Args:
        held: the inputs of a sequence.
    """

    def __init__(self, held: HeldBy) -> None:
        self._held = held
        self._known: dict[int, tuple[int, NDArray[np.float32]]] = {}  # by sequence: its length, and its biases
        self._in_use = False

    def of(self, batch: Batch) -> Mapping[int, NDArray[np.float32]]:
        """The biases of keys [n] by sequence, after a batch, without sequences that have none."""
        bias = batch.bias
        self._in_use = self._in_use or len(bias) > 0
        if not self._in_use:
            return {}
        of_batch = np.zeros(len(batch), np.float32)
        if len(bias):
            of_batch[batch.tokens == EMBEDDED] = bias
        biases = {}
        for seq_id in np.unique(batch.seq_ids).tolist():
            is_own = batch.seq_ids == seq_id
            first = int(batch.positions[is_own][0])
            before, added = self._before(seq_id, first), of_batch[is_own]
            if added.any():
                before = np.concatenate([before, np.zeros(first - len(before), np.float32), added[: _end(added)]])
            self._known[seq_id] = first + len(added), before
            if len(before):
                biases[seq_id] = before
        return biases

    def look_for(self, held: Sequence[Held]) -> None:
        """Look for biases from now on if inputs that are restored have some. Replays decode, and need no call."""
        self._in_use = self._in_use or any(map(bias_of, held))

    def forget(self, seq_id: int) -> None:
        """Drop the cached biases of a sequence after an edit."""
        self._known.pop(seq_id, None)

    def _before(self, seq_id: int, length: int) -> NDArray[np.float32]:
        """The biases of the first ``length`` inputs of a sequence."""
        known = self._known.get(seq_id)
        if known is not None and known[0] == length:
            return known[1]
        return key_biases(self._held(seq_id)[:length])


def _end(biases: NDArray[np.float32]) -> int:
    """The number of biases up to the last one that is not 0."""
    nonzero = np.flatnonzero(biases)
    return int(nonzero[-1]) + 1 if len(nonzero) else 0
