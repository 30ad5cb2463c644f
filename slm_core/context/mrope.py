"""M-RoPE positions. The position of a token is its index, unless embedding rows with offsets come before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held, HeldInput, next_mrope_position
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED

HeldBy = Callable[[int], Sequence[Held]]
"""From a sequence id to the inputs of the sequence."""


def mrope_positions_of(held: Sequence[Held]) -> NDArray[np.int64]:
    """The M-RoPE positions of all inputs of a sequence, in time, height and width, [S, 3]."""
    offsets, advances = np.zeros((len(held), 3), np.int64), np.ones(len(held), np.int64)
    for i, one in enumerate(held):
        if isinstance(one, HeldInput):
            offsets[i], advances[i] = one.offset, next_mrope_position((one,))
    positions: NDArray[np.int64] = offsets + (np.cumsum(advances) - advances)[:, None]
    return positions


class MropePositions:
    """The M-RoPE positions of sequences. The position of the next token of each sequence is cached.

    Args:
        held: the inputs of a sequence.
    """

    def __init__(self, held: HeldBy) -> None:
        self._held = held
        self._next: dict[int, tuple[int, int]] = {}  # by sequence: its length and the M-RoPE position of the next token

    def of(self, batch: Batch) -> NDArray[np.integer]:
        """The M-RoPE positions of a batch: [T], or [T, 3] in time, height and width if rows have offsets."""
        starts = {seq_id: self._after(seq_id, batch) for seq_id in np.unique(batch.seq_ids).tolist()}
        if not len(batch.offsets):
            positions = batch.positions.astype(np.int64)
            for seq_id, (first, mrope_position) in starts.items():
                in_sequence = batch.seq_ids == seq_id
                positions[in_sequence] += mrope_position - first
                self._next[seq_id] = first + int(in_sequence.sum()), mrope_position + int(in_sequence.sum())
            return positions
        offsets = np.zeros((len(batch), 3), np.int64)
        offsets[batch.tokens == EMBEDDED] = batch.offsets
        for i, seq_id in enumerate(batch.seq_ids.tolist()):
            length, mrope_position = starts[seq_id]
            offsets[i] += mrope_position
            starts[seq_id] = length + 1, max(mrope_position, int(offsets[i].max()) + 1)
        self._next |= starts
        return offsets

    def between(self, seq_id: int, start: int, end: int) -> int:
        """The number of M-RoPE positions of the tokens [start, end) of a sequence."""
        held = self._held(seq_id)
        first = next_mrope_position(held[:start])
        return next_mrope_position(held[start:end], first) - first

    def forget(self, seq_id: int) -> None:
        """Drop the cached position of a sequence after an edit."""
        self._next.pop(seq_id, None)

    def _after(self, seq_id: int, batch: Batch) -> tuple[int, int]:
        """The length of a sequence before a batch, and the M-RoPE position of its first token in the batch."""
        first = int(batch.positions[np.argmax(batch.seq_ids == seq_id)])
        cached = self._next.get(seq_id)
        if cached is not None and cached[0] == first:
            return cached
        return first, next_mrope_position(self._held(seq_id)[:first])
