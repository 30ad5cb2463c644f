"""Names of the graphs' inputs and outputs, and the layers that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

from slm_core.architectures import ModelSpec, RopeSpec, TemperatureSpec
from slm_core.types import KvType

LORA_A, LORA_B = "lora_a.", "lora_b."
"""Prefixes of the inputs for low-rank changes of matrices."""
DIRECTION = "direction."
"""Prefix of the inputs for directions of control vectors [E]; the number of the layer follows."""
PLANES = ("key", "value")

_Kind = TypeVar("_Kind")


def past(layer: int | str, plane: str) -> str:
    """The name of the input with a layer's keys or values, [1, K, c, D]."""
    return f"past_key_values.{layer}.{plane}"


def present(layer: int | str, plane: str) -> str:
    """The name of the output with a layer's keys or values after the run; bound to the same memory."""
    return f"present.{layer}.{plane}"


def rows_of(layer: int, plane: str) -> str:
    """The name of some cells of a layer's keys or values, [1, K, n, D], copied from or to the host."""
    return f"rows.{layer}.{plane}"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's keys or values: [1, K, c, width].

    Attributes:
        suffix: suffix of the port's name.
        dtype: "float32", "float16" or "int8".
        width: numbers per cell and head.
    """

    suffix: str
    dtype: str
    width: int


def parts(kv_type: KvType, head_dim: int) -> tuple[Part, ...]:
    """The tensors of keys or values of a KV type: 8-bit types have codes, and a scale per cell and head."""
    if kv_type is KvType.Q8_0:
        return Part("", "int8", head_dim), Part(".scale", "float32", 1)
    return (Part("", {KvType.F32: "float32", KvType.F16: "float16"}[kv_type], head_dim),)


def rotation(kind: int) -> tuple[str, str]:
    """The names of a rotation's cosines and sines."""
    return f"cos.{kind}", f"sin.{kind}"


def attention_bias(kind: int) -> str:
    """The name of the attention bias for one window size."""
    return f"attention_bias.{kind}"


def temperature(kind: int) -> str:
    """The name of the factors on queries."""
    return f"temperature.{kind}"


@dataclass(frozen=True, slots=True)
class Kinds:
    """The distinct RoPEs, windows and temperatures of layers; indices are the numbers in the names of inputs.

    Attributes:
        ropes: the RoPEs; layers without RoPE have none.
        windows: the window sizes; None for layers without a window.
        temperatures: the temperatures of queries; None for layers without one.
    """

    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    temperatures: tuple[TemperatureSpec, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """The kinds of a model."""
        return cls(
            _distinct(layer.rope for layer in spec.layers),
            tuple(dict.fromkeys(layer.window for layer in spec.layers)),
            _distinct(layer.temperature for layer in spec.layers),
        )


def _distinct(kinds: Iterable[_Kind | None]) -> tuple[_Kind, ...]:
    return tuple(kind for kind in dict.fromkeys(kinds) if kind is not None)
