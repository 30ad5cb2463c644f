"""IQ2_S: 256 weights, eight at a time from a grid of 1024 points, with signs."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import iq2_s_grid
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, fields, scaled, signs_of_bytes

_IQ2_S_GRID = Table(iq2_s_grid)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    points = blocks.tensor("points")
    scales = blocks.scale() * (fields(blocks.tensor("sub_scales"), 4).float() + 0.5) * 0.25
    index = points.long() | fields(blocks.tensor("high_points"), 2).long() << 8
    return scaled(scales, _IQ2_S_GRID.on(points.device)[index] * signs_of_bytes(blocks.tensor("signs")))
