"""IQ2_XXS: 256 weights, eight at a time from a grid of 256 points, with signs."""

from __future__ import annotations

from torch import Tensor

from slm_core.quant._iq_tables import iq2_xxs_grid, signs_of_seven_bits
from slm_native.kernels.torch.unpack._blocks import Blocks, scaled, shifted, table


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale + 1/2) / 4 * point * sign``."""
    groups = blocks.group("groups")
    words = groups.tensor("signs")  # [N, 8]
    scales = blocks.scale() * ((words >> 28).float() + 0.5) * 0.25
    points = table(iq2_xxs_grid, words.device)[groups.tensor("points").long()]  # [N, 8, 4, 8]
    return scaled(scales, points * packed_signs(words))


def packed_signs(words: Tensor) -> Tensor:
    """Signs of 32 weights, in the low 28 bits of each word: [N, m] to [N, m, 4, 8]."""
    return table(signs_of_seven_bits, words.device)[shifted(words, (0, 7, 14, 21), 127)]
