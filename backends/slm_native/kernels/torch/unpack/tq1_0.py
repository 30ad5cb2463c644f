"""TQ1_0: 256 ternary weights, five to a byte in base 3."""

from __future__ import annotations

import torch
from torch import Tensor

from slm_native.kernels.torch.unpack._blocks import Blocks


def expand(blocks: Blocks) -> Tensor:
    """``scale * (digit - 1)``."""
    runs = [_digits(blocks.tensor(name), n) for name, n in (("five_by_32", 5), ("five_by_16", 5), ("four_by_4", 4))]
    return blocks.scale() * (torch.cat(runs, dim=1) - 1)


def _digits(packed: Tensor, n: int) -> Tensor:
    """The first ``n`` base-3 digits of each byte, [N, m] to [N, n * m], digit slowest; see ``slm_core.quant``."""
    powers = torch.tensor([1, 3, 9, 27, 81][:n], dtype=torch.int32, device=packed.device)[:, None]
    fraction = packed[:, None, :].to(torch.int32) * powers & 255
    return (fraction * 3 >> 8).reshape(len(packed), -1).float()
