"""IQ1_M: 256 weights, eight at a time from a ternary grid of 2048 points."""

from __future__ import annotations

import torch
from torch import Tensor

from slm_core.quant._iq_tables import IQ1_SHIFT, iq1_grid
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, fields, scaled, shifted

_IQ1_GRID = Table(iq1_grid)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (2 sub_scale + 1) * (point ± 1/8)``."""
    packed = blocks.tensor("sub_scales")  # [N, 4]
    sub_scales = shifted(packed, (0, 3, 6, 9), 7).reshape(-1, 16)
    scales = _scale(packed)[:, None] * (2 * sub_scales.float() + 1)
    high = fields(blocks.tensor("high_points"), 4)  # [N, 32]
    shift = float(IQ1_SHIFT) - 2 * float(IQ1_SHIFT) * (high >> 3).float()
    index = blocks.tensor("points").long() | (high & 7).long() << 8
    return scaled(scales, _IQ1_GRID.on(packed.device)[index] + shift[..., None])  # [N, 32, 8]


def _scale(packed: Tensor) -> Tensor:
    """The f16 of a block; each word has four of its bits at the top, lowest first: [N, 4] to float32 [N]."""
    quarter = packed >> 12
    bits = quarter[:, 0] | quarter[:, 1] << 4 | quarter[:, 2] << 8 | quarter[:, 3] << 12
    return bits.to(torch.int16).view(torch.float16).float()
