"""F16: IEEE half precision."""

from __future__ import annotations

from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks


def expand(blocks: Blocks) -> Tensor:
    """The exact weight."""
    return blocks.tensor("weight").float()
