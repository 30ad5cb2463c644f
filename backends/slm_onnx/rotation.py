"""Measures a model's RoPE: its graph computes one token's key at several positions.

A key that is rotated by RoPE turns, pair by pair, by an angle that grows with the position. The first key gives the
pairs their start, keys further and further away give the angles, each more exact than the one before, and a last key
tells whether all that holds in every layer.
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
"""The keys [N, D] of one token at a position, for N heads of the layers."""

_FACTOR = 4  # each measurement is so many times as far as the last: its angle is then known to less than half a turn
_LARGEST = 1024
_CHECK = 0.77  # the last key is in between, at no power
_TOLERANCE = {np.dtype(np.float32): 2e-3, np.dtype(np.float16): 2e-2}  # relative; wrong pairs give about 1
_FIXED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What moves a key to another position.

    Attributes:
        style: which values make a pair.
        frequencies: radians a position, float64 [R/2]; values from R on pass through.
    """

    style: RopeStyle
    frequencies: NDArray[np.float64]

    def turn(self, keys: FloatArray, delta: int) -> FloatArray:
        """Keys [..., D] moved by ``delta`` positions."""
        turned = _pairs(keys, self.style, 2 * len(self.frequencies)) * np.exp(1j * delta * self.frequencies)
        return _unpaired(turned, keys, self.style)


def changes_with_length(config: Mapping[str, Any]) -> bool:
    """Whether keys of a model depend on the length of the text, so that no edit keeps them."""
    sections = [config.get("rope_parameters"), config.get("rope_scaling")]
    sections += [inner for outer in sections if isinstance(outer, dict) for inner in outer.values()]
    kinds = {str(part.get("rope_type", part.get("type", "default"))) for part in sections if isinstance(part, dict)}
    return not kinds <= set(_FIXED)


def measure(keys_at: KeysAt, n_positions: int, widths: Sequence[int], dtype: np.dtype[Any]) -> Rotation | None:
    """Measure a model's RoPE; None if its keys change in another way.

    Args:
        keys_at: runs the model.
        n_positions: positions that may be asked for.
        widths: how many of a head's values may be rotated, R: candidates.
        dtype: of the keys.
    """
    last = min(_LARGEST, n_positions - 1)
    places = list(itertools.takewhile(lambda place: place <= last, (_FACTOR**i for i in itertools.count())))
    if not places:
        return None
    first, far = keys_at(0), [(place, keys_at(place)) for place in places]
    check = max(1, int(_CHECK * places[-1]))
    expected = keys_at(check)
    for style, width in itertools.product((RopeStyle.HALF_SPLIT, RopeStyle.INTERLEAVED), widths):
        rotation = Rotation(style, _frequencies(first, far, style, width))
        error = np.linalg.norm(rotation.turn(first, check) - expected, axis=1)
        if (error <= _TOLERANCE[dtype] * np.linalg.norm(expected, axis=1)).all():
            return rotation
    return None


def _frequencies(
    first: FloatArray, far: Sequence[tuple[int, FloatArray]], style: RopeStyle, width: int
) -> NDArray[np.float64]:
    """Angles a position, float64 [R/2]: of all heads together, so that no pair depends on one small key."""
    start = _pairs(first, style, width)
    frequencies = np.zeros(width // 2)
    for place, keys in far:
        angle = np.angle((_pairs(keys, style, width) * start.conj()).sum(axis=0))
        turns = np.round((frequencies * place - angle) / (2 * np.pi))
        frequencies = (angle + 2 * np.pi * turns) / place
    return frequencies


def _pairs(keys: FloatArray, style: RopeStyle, width: int) -> NDArray[np.complex128]:
    """The rotated values of keys [..., D] as complex numbers [..., R/2]."""
    if style is RopeStyle.INTERLEAVED:
        return keys[..., 0:width:2] + 1j * keys[..., 1:width:2].astype(np.float64)
    return keys[..., : width // 2] + 1j * keys[..., width // 2 : width].astype(np.float64)


def _unpaired(pairs: NDArray[np.complex128], keys: FloatArray, style: RopeStyle) -> FloatArray:
    turned, width = keys.copy(), 2 * pairs.shape[-1]
    if style is RopeStyle.INTERLEAVED:
        turned[..., 0:width:2], turned[..., 1:width:2] = pairs.real, pairs.imag
    else:
        turned[..., : width // 2], turned[..., width // 2 : width] = pairs.real, pairs.imag
    return turned
