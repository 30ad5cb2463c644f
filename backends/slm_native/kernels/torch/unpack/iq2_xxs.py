"""IQ2_XXS: 256 weights, eight at a time from a grid of 256 points, with signs."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import iq2_xxs_grid, signs_of_seven_bits
from slm_native.kernels.torch.unpack._blocks import Blocks, Table, scaled, shifted

_IQ2_XXS_GRID = Table(iq2_xxs_grid)
_SIGNS_OF_SEVEN_BITS = Table(signs_of_seven_bits)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    groups = blocks.group("groups")
    words = groups.tensor("signs")  # [N, 8]
    scales = blocks.scale() * ((words >> 28).float() + 0.5) * 0.25
    points = _IQ2_XXS_GRID.on(words.device)[groups.tensor("points").long()]  # [N, 8, 4, 8]
    return scaled(scales, points * packed_signs(words))


def packed_signs(words: Tensor) -> Tensor:
    """Signs of 32 weights, in the low 28 bits of each word: [N, m] to [N, m, 4, 8]."""
    return _SIGNS_OF_SEVEN_BITS.on(words.device)[shifted(words, (0, 7, 14, 21), 127)]
