"""Q8_0: 32 signed bytes, one scale."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks, affine


def expand(blocks: Blocks) -> Tensor:
    """``scale * q``."""
    return affine(blocks.tensor("quants")[:, None], blocks.scale())
