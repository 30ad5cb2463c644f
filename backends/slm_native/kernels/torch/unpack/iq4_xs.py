"""IQ4_XS: 256 weights of 4 bits on 16 uneven levels, 8 sub-blocks of 32."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, Table, affine, fields, planes
from slm_native.kernels.torch.unpack.iq4_nl import levels

_LEVELS = Table(levels)


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale - 32) * level[q]``."""
    nibbles = blocks.tensor("nibbles")
    sub_scales = fields(blocks.tensor("low_scales"), 4) | fields(blocks.tensor("high_scales"), 2) << 4
    codes = planes(nibbles, 4).reshape(-1, 8, 32).long()
    return affine(_LEVELS.on(nibbles.device)[codes], blocks.scale() * (sub_scales.float() - 32))
