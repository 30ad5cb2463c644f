"""Q3_K: 256 weights of 3 bits around zero in 16 sub-blocks of 16."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * (sub_scale - 32) * (q - 4)``."""
    low = planes(blocks.tensor("low_scales"), 4).reshape(-1, 16)
    high = planes(blocks.tensor("high_scales"), 2).reshape(-1, 16)
    scales = blocks.scale() * ((low | high << 4).float() - 32)
    q = (
        planes(blocks.tensor("quants"), 2).reshape(-1, 256)
        | planes(blocks.tensor("high_bits"), 1).reshape(-1, 256) << 2
    )
    return affine(q.reshape(-1, 16, 16), scales, zero=4)
