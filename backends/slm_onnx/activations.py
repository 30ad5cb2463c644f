"""The activations of feed-forward layers, as nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from slm_core.architectures import Activation, AnyActivation, Xielu

if TYPE_CHECKING:
    from slm_onnx.graphwriter import GraphWriter


def activated(graph: GraphWriter, x: str, activation: AnyActivation, dtype: str) -> str:
    """Add ``activation(x)``; returns its name."""
    if isinstance(activation, Xielu):
        return _xielu(graph, x, activation, dtype)
    return ACTIVATIONS[activation](graph, x)


def _silu(graph: GraphWriter, x: str) -> str:
    return graph.node("Mul", [x, graph.node("Sigmoid", [x], f"{x}.sigmoid")], f"{x}.silu")


def _gelu(graph: GraphWriter, x: str) -> str:
    return graph.node("Gelu", [x], f"{x}.gelu")


def _gelu_tanh(graph: GraphWriter, x: str) -> str:
    return graph.node("Gelu", [x], f"{x}.gelu", approximate="tanh")


def _relu(graph: GraphWriter, x: str) -> str:
    return graph.node("Relu", [x], f"{x}.relu")


def _relu_squared(graph: GraphWriter, x: str) -> str:
    positive = _relu(graph, x)
    return graph.node("Mul", [positive, positive], f"{positive}.squared")


ACTIVATIONS: Mapping[Activation, Callable[[GraphWriter, str], str]] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.RELU_SQUARED: _relu_squared,
}
"""The activations of dense layers in graphs; the others belong to experts."""


def _xielu(graph: GraphWriter, x: str, numbers: Xielu, dtype: str) -> str:
    """``alpha_p x² + beta x`` above 0, ``alpha_n (exp(min(x, eps)) - 1 - x) + beta x`` below."""

    def number(value: float) -> str:
        return graph.number(value, dtype)

    square = graph.node("Mul", [x, x], f"{x}.square")
    above = graph.node("Mul", [square, number(numbers.alpha_p)], f"{x}.above")
    least = graph.node("Min", [x, number(numbers.eps)], f"{x}.least")
    power = graph.node("Exp", [least], f"{x}.exp")
    less = graph.node("Sub", [graph.node("Sub", [power, number(1.0)], f"{x}.expm1"), x], f"{x}.less")
    below = graph.node("Mul", [less, number(numbers.alpha_n)], f"{x}.below")
    side = graph.node("Greater", [x, number(0.0)], f"{x}.side")
    curved = graph.node("Where", [side, above, below], f"{x}.curved")
    straight = graph.node("Mul", [x, number(numbers.beta)], f"{x}.straight")
    return graph.node("Add", [curved, straight], f"{x}.xielu")
