"""Q4_0: 32 weights of 4 bits around zero."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * (q - 8)``."""
    return affine(planes(blocks.tensor("nibbles"), 4).reshape(-1, 1, 32), blocks.scale(), zero=8)
