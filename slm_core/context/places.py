"""Where tokens stand to be rotated: at their index, but behind rows that stood apart in time, height and width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held, HeldInput, next_place
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED

HeldBy = Callable[[int], Sequence[Held]]
"""What a sequence holds, by its seq_id."""


def places_of(held: Sequence[Held]) -> NDArray[np.int64]:
    """Where all that a sequence holds stands, in time, height and width, [S, 3]."""
    offsets, taken = np.zeros((len(held), 3), np.int64), np.ones(len(held), np.int64)
    for i, one in enumerate(held):
        if isinstance(one, HeldInput):
            offsets[i], taken[i] = one.offset, next_place((one,))
    found: NDArray[np.int64] = offsets + (np.cumsum(taken) - taken)[:, None]
    return found


class Places:
    """The places of sequences' tokens. Each is counted once: that of the next token is remembered.

    Args:
        held: what a sequence holds.
    """

    def __init__(self, held: HeldBy) -> None:
        self._held = held
        self._next: dict[int, tuple[int, int]] = {}  # of a sequence, its length and the place of the next token

    def of(self, batch: Batch) -> NDArray[np.integer]:
        """Where the tokens of a batch stand, [T]; [T, 3], in time, height and width, where rows stand apart."""
        starts = {seq_id: self._after(seq_id, batch) for seq_id in np.unique(batch.seq_ids).tolist()}
        if not len(batch.offsets):
            found = batch.positions.astype(np.int64)
            for seq_id, (first, place) in starts.items():
                own = batch.seq_ids == seq_id
                found[own] += place - first
                self._next[seq_id] = first + int(own.sum()), place + int(own.sum())
            return found
        offsets = np.zeros((len(batch), 3), np.int64)
        offsets[batch.tokens == EMBEDDED] = batch.offsets
        for i, seq_id in enumerate(batch.seq_ids.tolist()):
            length, place = starts[seq_id]
            offsets[i] += place
            starts[seq_id] = length + 1, max(place, int(offsets[i].max()) + 1)
        self._next |= starts
        return offsets

    def between(self, seq_id: int, start: int, end: int) -> int:
        """How many places the tokens [start, end) of a sequence take."""
        held = self._held(seq_id)
        first = next_place(held[:start])
        return next_place(held[start:end], first) - first

    def forget(self, seq_id: int) -> None:
        """A sequence was edited."""
        self._next.pop(seq_id, None)

    def _after(self, seq_id: int, batch: Batch) -> tuple[int, int]:
        """What comes before a sequence's tokens in a batch: how many, and the place of the first."""
        first = int(batch.positions[np.argmax(batch.seq_ids == seq_id)])
        known = self._next.get(seq_id)
        return known if known is not None and known[0] == first else (first, next_place(self._held(seq_id)[:first]))
