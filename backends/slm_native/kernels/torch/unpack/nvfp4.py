"""NVFP4: 64 FP4 (E2M1) weights in 4 sub-blocks of 16, each with an unsigned FP8 (E4M3) scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slm_core.quant.nvfp4 import HALF_SCALES
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, affine, planes
from slm_native.kernels.torch.unpack.mxfp4 import levels


def half_scales() -> NDArray[np.float32]:
    """Half of the value of every scale byte [256]: the levels are doubled."""
    return HALF_SCALES


_HALF_SCALES = Table(half_scales)
_LEVELS = Table(levels)


def expand(blocks: Blocks) -> Tensor:
    """``scale * e2m1(q)``."""
    nibbles = blocks.tensor("nibbles")
    scales = _HALF_SCALES.on(nibbles.device)[blocks.tensor("scales").long()]
    return affine(_LEVELS.on(nibbles.device)[planes(nibbles, 4).reshape(-1, 4, 16).long()], scales)
