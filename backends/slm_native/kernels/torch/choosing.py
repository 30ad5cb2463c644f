"""Top-k logits on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slm_core.types import TopLogits

DEVICES = ("cpu", "cuda", "xpu")
"""The kinds of devices on which torch can rank 64-bit integers."""

_LOW = (1 << 32) - 1


def top_logits(logits: Tensor, k: int) -> TopLogits:
    """The ``k`` largest logits of each row, in one copy to the host.

    Torch does not specify the order of equal numbers. So distinct 64-bit integers are ranked: the upper half has the
    logit's bits, in the order of the floats; the lower half is the id, counted down from the last id.

    Args:
        logits: [rows, V], float32; NaN counts as the largest.
        k: number of logits per row, 1 to V.
    """
    n_vocab = logits.shape[1]
    if k == 1:
        tokens = logits.argmax(1, keepdim=True)  # torch promises the first of equal logits here
    else:
        bits = (logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # bits of negative floats are in reverse order
        from_last = torch.arange(n_vocab - 1, -1, -1, device=logits.device)
        tokens = n_vocab - 1 - (((ordered << 32) | from_last).topk(k, dim=1).values & _LOW)
    totals = logits.logsumexp(1, keepdim=True)
    numbers = torch.cat([logits.gather(1, tokens), totals], 1).contiguous().view(torch.int32)
    packed = torch.cat([tokens.int(), numbers], 1).cpu().numpy()
    floats = packed[:, k:].view(np.float32)
    return TopLogits(packed[:, :k].copy(), floats[:, :k].copy(), floats[:, k].copy())
