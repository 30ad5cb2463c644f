"""IQ3_S: 256 weights, four at a time from a grid of 512 points, with signs."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import iq3_s_grid
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, fields, scaled, signs_of_bytes

_IQ3_S_GRID = Table(iq3_s_grid)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (2 sub_scale + 1) * point * sign``."""
    low = blocks.tensor("points")
    scales = blocks.scale() * (2 * fields(blocks.tensor("sub_scales"), 4).float() + 1)
    index = low.long() | fields(blocks.tensor("high_points"), 1).long() << 8
    points = _IQ3_S_GRID.on(low.device)[index].reshape(-1, 32, 8)
    return scaled(scales, points * signs_of_bytes(blocks.tensor("signs")))
