"""IQ2_XS: 256 weights, eight at a time from a grid of 512 points, with signs."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import iq2_xs_grid, signs_of_seven_bits
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, fields, scaled

_IQ2_XS_GRID = Table(iq2_xs_grid)
_SIGNS_OF_SEVEN_BITS = Table(signs_of_seven_bits)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    points = blocks.tensor("points")
    scales = blocks.scale() * (fields(blocks.tensor("sub_scales"), 4).float() + 0.5) * 0.25
    signs = _SIGNS_OF_SEVEN_BITS.on(points.device)[points >> 9]
    return scaled(scales, _IQ2_XS_GRID.on(points.device)[points & 511] * signs)
