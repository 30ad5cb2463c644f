"""Q5_1: 32 weights of 5 bits, scale and minimum."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, fields, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * q + minimum``."""
    q = planes(blocks.tensor("nibbles"), 4).reshape(-1, 32) | fields(blocks.tensor("high_bits"), 1) << 4
    return affine(q[:, None], blocks.scale(), minus=-blocks.scale("minimum"))
