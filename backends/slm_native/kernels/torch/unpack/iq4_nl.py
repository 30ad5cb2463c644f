"""IQ4_NL: 32 weights of 4 bits, as indices of 16 uneven levels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slm_core.quant._iq_tables import IQ4_LEVELS
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, affine, planes


def levels() -> NDArray[np.float32]:
    """The values of the sixteen codes."""
    return IQ4_LEVELS


_LEVELS = Table(levels)


def expand(blocks: Blocks) -> Tensor:
    """``scale * level[q]``."""
    nibbles = blocks.tensor("nibbles")
    codes = planes(nibbles, 4).reshape(-1, 1, 32).long()
    return affine(_LEVELS.on(nibbles.device)[codes], blocks.scale())
