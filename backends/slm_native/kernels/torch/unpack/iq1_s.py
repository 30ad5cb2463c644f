"""IQ1_S: 256 weights, eight at a time from a ternary grid of 2048 points."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import IQ1_SHIFT, iq1_grid
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, scaled, shifted

_IQ1_GRID = Table(iq1_grid)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (2 sub_scale + 1) * (point ± 1/8)``."""
    high = blocks.tensor("high_points")  # [N, 8]
    scales = blocks.scale() * (2 * (high >> 12 & 7).float() + 1)
    shift = float(IQ1_SHIFT) - 2 * float(IQ1_SHIFT) * (high >> 15).float()
    index = blocks.tensor("points").long() | shifted(high, (0, 3, 6, 9), 7).long() << 8  # [N, 8, 4]
    return scaled(scales, _IQ1_GRID.on(high.device)[index] + shift[..., None, None])
