"""IQ3_XXS: 256 weights, four at a time from a grid of 256 points, with signs."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import iq3_xxs_grid
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, scaled
from slm_native.kernels.torch.unpack.iq2_xxs import packed_signs

_IQ3_XXS_GRID = Table(iq3_xxs_grid)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale + 1/2) / 2 * point * sign``."""
    words = blocks.tensor("signs")  # [N, 8]
    scales = blocks.scale() * ((words >> 28).float() + 0.5) * 0.5
    points = _IQ3_XXS_GRID.on(words.device)[blocks.tensor("points").long()].reshape(-1, 8, 4, 8)
    return scaled(scales, points * packed_signs(words))
