"""Q2_K: 256 weights of 2 bits in 16 sub-blocks of 16."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * sub_scale * q - min_scale * sub_min``."""
    sub_scales = blocks.tensor("sub_scales")
    scales = blocks.scale() * (sub_scales & 15).float()
    minimums = blocks.scale("min_scale") * (sub_scales >> 4).float()
    return affine(planes(blocks.tensor("quants"), 2).reshape(-1, 16, 16), scales, minus=minimums)
