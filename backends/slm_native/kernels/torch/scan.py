"""Recurrent layers in torch: the scan over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor


def selective_scan(x: Tensor, steps: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """See ``KernelSet.selective_scan``."""
    n_seqs, n_tokens, n_heads, width = x.shape
    n_groups, n_state = b.shape[2:]
    grouped = (n_groups, n_heads // n_groups)
    steps = F.softplus(steps).reshape(n_seqs, n_tokens, *grouped, 1, 1)
    driven = steps * x.reshape(n_seqs, n_tokens, *grouped, width, 1)
    decay, states = a.reshape(*grouped, 1, -1), state.reshape(n_seqs, *grouped, width, n_state)
    b, c = b[:, :, :, None, None], c[:, :, :, None, None]  # [B, T, G, 1, 1, N]
    y = []
    for t in range(n_tokens):
        states = torch.exp(steps[:, t] * decay) * states + driven[:, t] * b[:, t]
        y.append((states * c[:, t]).sum(-1))
    return torch.stack(y, dim=1).reshape(x.shape), states.reshape(state.shape)


def delta_scan(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``KernelSet.delta_scan``."""
    decay, y = log_decay.exp(), []
    for t in range(v.shape[1]):
        removed = state @ a[:, t, :, :, None]
        state = state * decay[:, t, :, None] + removed * b[:, t, :, None] + v[:, t, :, :, None] * k[:, t, :, None]
        y.append((state @ r[:, t, :, :, None])[..., 0])
    return torch.stack(y, dim=1), state
