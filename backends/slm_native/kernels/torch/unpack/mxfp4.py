"""MXFP4: 32 FP4 (E2M1) weights, one power-of-two scale (E8M0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slm_core.quant._format import E2M1_DOUBLED
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, affine, planes


def levels() -> NDArray[np.float32]:
    """Twice the values of the sixteen codes."""
    return E2M1_DOUBLED


def half_scales() -> NDArray[np.float32]:
    """Half of the value of every scale byte [256]: the levels are doubled."""
    return np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


_HALF_SCALES = Table(half_scales)
_LEVELS = Table(levels)


def expand(blocks: Blocks) -> Tensor:
    """``scale * e2m1(q)``."""
    nibbles = blocks.tensor("nibbles")
    scales = _HALF_SCALES.on(nibbles.device)[blocks.tensor("exponent").long()]
    return affine(_LEVELS.on(nibbles.device)[planes(nibbles, 4).reshape(-1, 1, 32).long()], scales[:, None])
