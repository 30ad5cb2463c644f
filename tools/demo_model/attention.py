"""Attention for training on a CPU, registered with transformers as "demo_cpu".

The backward pass of PyTorch's fused CPU attention takes about half of a training step at this model size; plain matrix
products and a softmax are much faster.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "demo_cpu"
MASKED = -30000.0  # finite in bfloat16, and far below any score
_causal_biases: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def causal_bias(length: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, T] additive bias that hides the future."""
    key = (length, dtype)
    if key not in _causal_biases:
        _causal_biases[key] = torch.full((length, length), MASKED, dtype=dtype).triu(1)
    return _causal_biases[key]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, K, T, D]
    value: torch.Tensor,  # [B, K, T, D]
    attention_mask: torch.Tensor | None = None,  # [B, 1, T, T], additive; None: causal
    scaling: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention; returns [B, T, H, D]."""
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    rows = (query * scaling).reshape(batch, groups, -1, dim).to(key.dtype)  # [B, K, H/K * T, D]
    scores = (rows @ key.transpose(2, 3)).view(batch, groups, -1, length, length)
    bias = causal_bias(length, scores.dtype) if attention_mask is None else attention_mask.unsqueeze(1)
    weights = torch.softmax(scores + bias, dim=-1, dtype=scores.dtype)
    output = weights.view(batch, groups, -1, length).to(value.dtype) @ value
    return output.view(batch, heads, length, dim).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
