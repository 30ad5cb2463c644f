"""Measures a model's RoPE from one token's keys at several positions.

RoPE rotates each pair of a key's values by an angle proportional to the position. The key at position 0 gives the start
of each pair. Keys at growing positions give the angles with growing precision. A last key checks the result in every
layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import RopeStyle

FloatArray = NDArray[np.floating[Any]]
KeysAt = Callable[[int], FloatArray]
"""Returns the keys [N, D] of one token at a position, for N heads in all layers."""

_FACTOR = 4  # between measured positions: each angle is then known to less than half a rotation
_LARGEST = 1024
_CHECK = 0.77  # the last key is between two measured positions
_TOLERANCE = {np.dtype(np.float32): 2e-3, np.dtype(np.float16): 2e-2}  # relative; wrong pairs give about 1
_FIXED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation that moves a key to another position.

    Attributes:
        style: which values form a pair.
        frequencies: radians per position, float64 [R/2]; values from R on are not rotated.
    """

    style: RopeStyle
    frequencies: NDArray[np.float64]

    def rotate(self, keys: FloatArray, delta: int) -> FloatArray:
        """Rotate keys [..., D] by ``delta`` positions."""
        rotated = _pairs(keys, self.style, 2 * len(self.frequencies)) * np.exp(1j * delta * self.frequencies)
        return _unpaired(rotated, keys, self.style)


def changes_with_length(config: Mapping[str, Any]) -> bool:
    """Whether keys depend on the length of the text, so that no edit can keep them."""
    sections = [config.get("rope_parameters"), config.get("rope_scaling")]
    sections += [inner for outer in sections if isinstance(outer, dict) for inner in outer.values()]
    kinds = {str(part.get("rope_type", part.get("type", "default"))) for part in sections if isinstance(part, dict)}
    return not kinds <= set(_FIXED)


def measure(keys_at: KeysAt, n_positions: int, widths: Sequence[int], dtype: np.dtype[Any]) -> Rotation | None:
    """Measure a model's RoPE; None if its keys change in another way than by RoPE.

    Args:
        keys_at: runs the model.
        n_positions: number of positions that ``keys_at`` accepts.
        widths: candidates for R, the rotated width of a head.
        dtype: dtype of the keys.
    """
    last = min(_LARGEST, n_positions - 1)
    positions = list(itertools.takewhile(lambda position: position <= last, (_FACTOR**i for i in itertools.count())))
    if not positions:
        return None
    first, far = keys_at(0), [(position, keys_at(position)) for position in positions]
    check = max(1, int(_CHECK * positions[-1]))
    expected = keys_at(check)
    for style, width in itertools.product((RopeStyle.HALF_SPLIT, RopeStyle.INTERLEAVED), widths):
        rotation = Rotation(style, _frequencies(first, far, style, width))
        error = np.linalg.norm(rotation.rotate(first, check) - expected, axis=1)
        if (error <= _TOLERANCE[dtype] * np.linalg.norm(expected, axis=1)).all():
            return rotation
    return None


def _frequencies(
    first: FloatArray, far: Sequence[tuple[int, FloatArray]], style: RopeStyle, width: int
) -> NDArray[np.float64]:
    """Radians per position, float64 [R/2]; from all heads together, so that no pair depends on one small key."""
    start = _pairs(first, style, width)
    frequencies = np.zeros(width // 2)
    for position, keys in far:
        angle = np.angle((_pairs(keys, style, width) * start.conj()).sum(axis=0))
        turns = np.round((frequencies * position - angle) / (2 * np.pi))
        frequencies = (angle + 2 * np.pi * turns) / position
    return frequencies


def _pairs(keys: FloatArray, style: RopeStyle, width: int) -> NDArray[np.complex128]:
    """The rotated values of keys [..., D] as complex numbers [..., R/2]."""
    if style is RopeStyle.INTERLEAVED:
        return keys[..., 0:width:2] + 1j * keys[..., 1:width:2].astype(np.float64)
    return keys[..., : width // 2] + 1j * keys[..., width // 2 : width].astype(np.float64)


def _unpaired(pairs: NDArray[np.complex128], keys: FloatArray, style: RopeStyle) -> FloatArray:
    rotated, width = keys.copy(), 2 * pairs.shape[-1]
    if style is RopeStyle.INTERLEAVED:
        rotated[..., 0:width:2], rotated[..., 1:width:2] = pairs.real, pairs.imag
    else:
        rotated[..., : width // 2], rotated[..., width // 2 : width] = pairs.real, pairs.imag
    return rotated
