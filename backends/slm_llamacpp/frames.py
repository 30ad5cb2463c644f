"""Rows that stand apart, as llama.cpp keeps them: those of an image, or of a frame, have one position, their time.

It forgets and shares by that position, so a frame whole or not at all. And a row sees those that stand before it: in
time, else in height, else in width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held
from slm_core.context.mrope import mrope_positions_of

_FARTHEST = 2**31 - 1  # positions are int32
_Positions = NDArray[np.int64]
"""In time, height and width, [S, 3]."""


def frame_begin(places: _Positions, length: int) -> int:
    """How many of the first ``length`` tokens and rows stand at another time than what comes next, if anything does."""
    if length == len(places):
        return length
    return int(np.searchsorted(places[:length, 0], places[length, 0]))


def why_out_of_order(held: Sequence[Held]) -> str | None:
    """Why llama.cpp would let what a sequence holds see others than those before it; None where it does not."""
    places = mrope_positions_of(held)
    wrong = np.flatnonzero(~_in_order(places))
    if not len(wrong):
        return None
    return (
        f"the row at position {wrong[0]} stands at {tuple(places[wrong[0]].tolist())} (accepted by llama.cpp: rows"
        " that stand behind the one before them in time, else in height, else in width)"
    )


def _in_order(places: _Positions) -> NDArray[np.bool_]:
    """Whether each stands behind the one before it, and at a time that there is, [S]."""
    behind = np.zeros(max(0, len(places) - 1), np.bool_)
    for axis in (2, 1, 0):
        step = np.diff(places[:, axis])
        behind = (step > 0) | ((step == 0) & behind)
    found: NDArray[np.bool_] = (places[:, 0] >= 0) & (places <= _FARTHEST).all(axis=1)
    found[1:] &= behind
    return found
