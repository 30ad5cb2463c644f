"""Q5_K: 256 weights of 5 bits in 8 sub-blocks of 32."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes, six_bit_scales


def expand(blocks: Blocks) -> Tensor:
    """``scale * sub_scale * q - min_scale * sub_min``."""
    sub_scales, sub_mins = six_bit_scales(blocks.tensor("sub_scales"))
    q = planes(blocks.tensor("nibbles"), 4).reshape(-1, 8, 32) | planes(blocks.tensor("high_bits"), 1) << 4
    return affine(q, blocks.scale() * sub_scales, minus=blocks.scale("min_scale") * sub_mins)
