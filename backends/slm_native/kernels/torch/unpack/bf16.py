"""BF16: the upper half of a float32."""

from __future__ import annotations

import torch
from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks


def expand(blocks: Blocks) -> Tensor:
    """The exact weight: the lower half of the float32 is zero."""
    return (blocks.tensor("upper_half") << 16).view(torch.float32)
