"""TQ2_0: 256 ternary weights of 2 bits."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine, planes


def expand(blocks: Blocks) -> Tensor:
    """``scale * (q - 1)``."""
    return affine(planes(blocks.tensor("quants"), 2).reshape(-1, 1, 256), blocks.scale(), zero=1)
