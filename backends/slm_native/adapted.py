"""Steps with adapters.

The matrices stay as they are, and each product gets a low-rank part (LoRA). Control vectors are steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from slm_core.adapters import LowRank
from slm_native.kernels import KernelSet, Linear, Lora, Weight
from slm_native.offload import ResidentLayers
from slm_native.steps import Step

_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """The parts of a model that adapters change.

    Attributes:
        layers: the steps of all layers.
        output: the output matrix.
        embedding: the change of embeddings; its ``a`` is (E, r) and its ``b`` (V, r).
    """

    layers: ResidentLayers
    output: Linear
    embedding: Lora | None


def adapted(
    kernels: KernelSet, steps: Sequence[Step], output: Linear, embedding: Weight, changes: Mapping[str, LowRank]
) -> Adapted:
    """The steps and matrices with changes.

    Args:
        kernels: the kernel set.
        steps: the steps of all layers, with the directions of control vectors, not fused.
        output: the output matrix.
        embedding: the table of embeddings.
        changes: the change of each tensor, with a scale of 1.
    """

    def change(linear: Linear) -> Linear:
        name, rows = rows_of(linear)
        if name not in changes:
            return linear
        a, b, _ = changes[name]
        return replace(linear, lora=kernels.lora(linear.weight, a, b[rows]))

    embedding_change = None
    if _EMBEDDING in changes:
        a, b, _ = changes[_EMBEDDING]
        embedding_change = kernels.lora(embedding, a.T, b)
    fused = kernels.fuse([_replaced(step, change) for step in steps])
    return Adapted(ResidentLayers(fused), change(output) if _OUTPUT in changes else output, embedding_change)


def rows_of(linear: Linear) -> tuple[str, slice]:
    """The tensor of a matrix, and its rows in the tensor. ``WeightReader`` names matrices T, or T[start:stop]."""
    name, _, rows = linear.weight.tensor.name.partition("[")
    start, colon, stop = rows.removesuffix("]").partition(":")
    if not colon:
        return linear.weight.tensor.name, slice(None)
    return name, slice(int(start), int(stop))


def changeable(steps: Sequence[Step], output: Linear) -> set[str]:
    """The tensors whose changes can be computed."""
    names = {rows_of(linear)[0] for step in steps for linear in _linears(step)}
    return names | {rows_of(output)[0], _EMBEDDING}


def _linears(value: object) -> Iterator[Linear]:
    """The matrices in a step, and in its dataclasses and lists; without the matrices of layers in C++."""
    if isinstance(value, Linear):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _linears(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _linears(one)


def _replaced(value: Any, change: Callable[[Linear], Linear]) -> Any:
    """A step with other matrices; the same object if nothing changes."""
    if isinstance(value, Linear):
        return change(value)
    if isinstance(value, list):
        items = [_replaced(one, change) for one in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if not is_dataclass(value) or isinstance(value, type) or not any(True for _ in _linears(value)):
        return value
    new = {field.name: _replaced(getattr(value, field.name), change) for field in fields(value) if field.init}
    if all(new[name] is getattr(value, name) for name in new):
        return value
    return replace(value, **new)
