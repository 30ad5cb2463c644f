"""Q4_1: 32 weights of 4 bits, scale and minimum."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * q + minimum``."""
    q = planes(blocks.tensor("nibbles"), 4).reshape(-1, 1, 32)
    return affine(q, blocks.scale(), minus=-blocks.scale("minimum"))
