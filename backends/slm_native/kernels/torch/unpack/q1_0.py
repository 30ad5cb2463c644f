"""Q1_0: 128 weights of 1 bit, one scale."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, signs_of_bytes


def expand(blocks: Blocks) -> Tensor:
    """``±scale``."""
    return blocks.scale() * -signs_of_bytes(blocks.tensor("signs")).reshape(len(blocks), -1)
