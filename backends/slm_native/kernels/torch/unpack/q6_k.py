"""Q6_K: 256 weights of 6 bits around zero in 16 sub-blocks of 16."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * sub_scale * (q - 32)``."""
    scales = blocks.scale() * blocks.tensor("sub_scales").float()
    low = planes(blocks.tensor("low_bits"), 4).reshape(-1, 256)
    high = planes(blocks.tensor("high_bits"), 2).reshape(-1, 256)
    return affine((low | high << 4).reshape(-1, 16, 16), scales, zero=32)
