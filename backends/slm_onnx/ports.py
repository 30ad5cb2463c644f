"""The inputs and outputs of the graphs, by name, and the layers that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

from slm_core.architectures import ModelSpec, RopeSpec, TemperatureSpec
from slm_core.types import KvType

PLANES = ("key", "value")

_Kind = TypeVar("_Kind")


def past(layer: int | str, plane: str) -> str:
    """Name of the graphs' input that holds a layer's keys or values, [1, K, c, D]."""
    return f"past_key_values.{layer}.{plane}"


def present(layer: int | str, plane: str) -> str:
    """Name of the output that holds them afterwards; bound to the same memory."""
    return f"present.{layer}.{plane}"


def rows_of(layer: int, plane: str) -> str:
    """Name of some cells of a layer's keys or values, [1, K, n, D], on their way from or to the host."""
    return f"rows.{layer}.{plane}"


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that a layer's keys, or values, are kept in: [1, K, c, width].

    Attributes:
        suffix: behind the name of the port.
        dtype: "float32", "float16" or "int8".
        width: numbers for each cell of a head.
    """

    suffix: str
    dtype: str
    width: int


def parts(kv_type: KvType, head_dim: int) -> tuple[Part, ...]:
    """How keys and values of a type are kept: 8 bits are codes, and one scale for each cell of a head."""
    if kv_type is KvType.Q8_0:
        return Part("", "int8", head_dim), Part(".scale", "float32", 1)
    return (Part("", {KvType.F32: "float32", KvType.F16: "float16"}[kv_type], head_dim),)


def rotation(kind: int) -> tuple[str, str]:
    """Names of a rotation's cosines and sines."""
    return f"cos.{kind}", f"sin.{kind}"


def sight(kind: int) -> str:
    """Name of the bias of layers with one window."""
    return f"attention_bias.{kind}"


def temperature(kind: int) -> str:
    """Name of the factors on queries."""
    return f"temperature.{kind}"


@dataclass(frozen=True, slots=True)
class Kinds:
    """What layers do with positions, each kind once: its index is the number in the names of its inputs.

    Attributes:
        ropes: how they rotate; those that do not are not among them.
        windows: how far they see, None for everything.
        temperatures: how they sharpen queries, likewise.
    """

    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    temperatures: tuple[TemperatureSpec, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Those of a model."""
        return cls(
            _distinct(layer.rope for layer in spec.layers),
            tuple(dict.fromkeys(layer.window for layer in spec.layers)),
            _distinct(layer.temperature for layer in spec.layers),
        )


def _distinct(kinds: Iterable[_Kind | None]) -> tuple[_Kind, ...]:
    return tuple(kind for kind in dict.fromkeys(kinds) if kind is not None)
