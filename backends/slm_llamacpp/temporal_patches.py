"""Temporal patches: embedding rows of one image, or of a frame of a video, in llama.cpp's KV cache.

llama.cpp keeps one position for all rows of a temporal patch: its time. It removes and shares cells by that position,
so it can only remove or share a whole patch. A row attends to rows that precede it by time, then height, then width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held
from slm_core.context.mrope import mrope_positions_of

_FARTHEST = 2**31 - 1  # positions are int32
_Positions = NDArray[np.int64]
"""M-RoPE positions (time, height, width), [S, 3]."""


def patch_begin(positions: _Positions, length: int) -> int:
    """The start of the temporal patch that ``length`` splits; ``length`` if it splits none."""
    if length == len(positions):
        return length
    return int(np.searchsorted(positions[:length, 0], positions[length, 0]))


def why_out_of_order(held: Sequence[Held]) -> str | None:
    """Why llama.cpp would let an input attend to a later one; None if it does not."""
    positions = mrope_positions_of(held)
    wrong = np.flatnonzero(~_in_order(positions))
    if not len(wrong):
        return None
    return (
        f"the row at position {wrong[0]} has the M-RoPE position {tuple(positions[wrong[0]].tolist())} (accepted by"
        " llama.cpp: rows in increasing order of time, then height, then width)"
    )


def _in_order(positions: _Positions) -> NDArray[np.bool_]:
    """Whether each position is valid and greater than the one before it, [S]."""
    follows = np.zeros(max(0, len(positions) - 1), np.bool_)
    for axis in (2, 1, 0):
        step = np.diff(positions[:, axis])
        follows = (step > 0) | ((step == 0) & follows)
    in_order: NDArray[np.bool_] = (positions[:, 0] >= 0) & (positions <= _FARTHEST).all(axis=1)
    in_order[1:] &= follows
    return in_order
