"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864): the angles of each position."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures._spec import RopeSpec, YarnSpec
from slm_core.errors import InvalidModelFile

FloatArray: TypeAlias = NDArray[np.float32]


class Rope:
    """Angles grow linearly with the position, so a key that moves by n positions is rotated by n steps.

    Args:
        spec: the embedding.
        factors: a divisor for each frequency, float32 [R/2], or None (Llama 3 stores its scaling like this).

    Raises:
        InvalidModelFile: a factor that is not a positive number.
    """

    def __init__(self, spec: RopeSpec, factors: FloatArray | None) -> None:
        self.style = spec.style
        self._magnitude = spec.magnitude
        exponents = np.arange(0, spec.n_dims, 2) / spec.n_dims  # float64, as all angles: positions reach 10⁵
        base = spec.freq_base**-exponents
        if factors is not None:
            if not (np.isfinite(factors) & (factors > 0)).all():
                raise InvalidModelFile("tensor 'rope_freqs.weight' holds factors that are not positive numbers")
            base = base / factors
        ramp = yarn_ramp(spec.yarn, spec) if spec.yarn is not None else 0.0
        self.frequencies: NDArray[np.float64] = base / spec.factor * (1 - ramp) + base * ramp  # radians per position
        self._sections = list(spec.sections)

    def tables(self, positions: NDArray[np.integer]) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines for queries and keys at ``positions`` [T], or [T, 3]: float32 [T, R/2] each."""
        angles = (
            positions[:, None] if positions.ndim == 1 else np.take(positions, self._sections, 1)
        ) * self.frequencies
        return _float32(np.cos(angles) * self._magnitude), _float32(np.sin(angles) * self._magnitude)

    def step_tables(self, delta: int, n_tokens: int) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines that move ``n_tokens`` keys by ``delta`` positions: float32 [n_tokens, R/2] each."""
        angles = np.tile(delta * self.frequencies, (n_tokens, 1))
        return _float32(np.cos(angles)), _float32(np.sin(angles))


def yarn_ramp(yarn: YarnSpec, rope: RopeSpec) -> NDArray[np.float64]:
    """The share of each original frequency in YaRN: 1 for fast dimensions, 0 for slow ones, a ramp between; [R/2]."""

    def dimension(n_turns: float) -> float:
        return rope.n_dims * math.log(yarn.n_ctx_original / (n_turns * 2 * math.pi)) / (2 * math.log(rope.freq_base))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0, low), min(rope.n_dims - 1, high)
    position = (np.arange(rope.n_dims // 2) - low) / max(0.001, high - low)
    ramp: NDArray[np.float64] = 1 - np.clip(position, 0, 1).astype(np.float64)
    return ramp


def _float32(values: NDArray[np.float64]) -> FloatArray:
    return values.astype(np.float32)
