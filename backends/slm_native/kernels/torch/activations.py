"""The activations of feed-forward layers in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from slm_core.architectures import Activation, AnyActivation, Xielu


def activate(x: Tensor, activation: AnyActivation) -> Tensor:
    """An activation, elementwise."""
    return _xielu(x, activation) if isinstance(activation, Xielu) else _ACTIVATIONS[activation](x)


def gated(gate: Tensor, up: Tensor, activation: AnyActivation) -> Tensor:
    """``activation(gate) * up``; gpt-oss clamps both factors."""
    if activation is Activation.SWIGLU_CLAMPED:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        return gate * (1.702 * gate).sigmoid() * up
    return activate(gate, activation) * up


def _xielu(x: Tensor, by: Xielu) -> Tensor:
    below = by.alpha_n * (torch.expm1(x.clamp(max=by.eps)) - x)
    return torch.where(x > 0, by.alpha_p * x * x, below) + by.beta * x


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
}
