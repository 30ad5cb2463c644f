"""A step, and its inputs for a batch.

Shapes: T tokens of the batch, E embedding width, H query heads, K key and value heads, D head width, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.interrupts import uninterrupted
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import LayerPositions, Linear, Norm
from slm_native.kv import Array, BatchPlan, KvLayer
from slm_native.states import StateGroup

Hidden: TypeAlias = Array
"""The value between two steps: the residual stream [T, E]; between AltUp layers a list of N residual streams."""
PlanKind: TypeAlias = tuple[str, int] | None
"""The kind of plan that a layer reads: ("window", n), ("chunk", n), or None for all positions."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The inputs of steps for one batch.

    Attributes:
        positions: RoPE and temperature of each layer [L].
        plans: destinations of keys and values and the attention mask, for each layer [L].
        caches: the KV cache of each layer that has one.
        groups: the states of the batch's sequences, for recurrent layers.
        layer_embeddings: the per-layer embedding of the tokens [T, P], for each layer [L]; None for layers without one.
        output_mask: the rows that leave the last layer [T]; None for all.
        kept: the hidden states that each ``KeepStep`` stores, by number of the layer.
    """

    positions: Sequence[LayerPositions]
    plans: Sequence[BatchPlan]
    caches: Sequence[KvLayer]
    groups: Sequence[StateGroup]
    layer_embeddings: Sequence[Array | None]
    output_mask: NDArray[np.bool_] | None
    kept: dict[int, Array] = field(default_factory=dict)


class Step(ABC):
    """A part of the forward pass, with its weights. It does not depend on a batch, so threads may share it."""

    __slots__ = ()

    @abstractmethod
    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """The residual stream after this step.

        Args:
            x: the residual stream before it [T, E].
            inputs: the batch.

        Returns:
            [T, E]. From the attention or recurrent step of the last layer on: only the rows of the output mask
            [rows, E]. If there are no rows, no further step runs.
        """

    @abstractmethod
    def describe(self) -> str:
        """The step in one line, with the shapes of its matrices."""


def run_steps(steps: Iterable[Step], x: Hidden, inputs: StepInputs) -> Hidden:
    """``x`` after all steps; stops early if no row is left to compute."""
    for step in steps:
        uninterrupted.check()  # an interrupt may end the pass here: nothing is committed yet
        x = step.run(x, inputs)
        if len(x) == 0:
            return x
    return x


def output_rows(ops: Ops, x: Array, inputs: StepInputs, *, is_last: bool) -> Array:
    """The rows of ``x`` [T, ...] that leave the layer: all of them, or the output mask's in the last layer."""
    return ops.rows(x, inputs.output_mask) if is_last and inputs.output_mask is not None else x


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """Adds the result of a branch to the residual stream.

    Attributes:
        ops: the kernel set.
        post_norm: norm of the result [E].
        scale: factor on the result.
    """

    ops: Ops
    post_norm: Norm | None
    scale: float

    @property
    def is_plain(self) -> bool:
        """Whether results are added without norm and factor."""
        return self.post_norm is None and self.scale == 1

    def add_product(self, residual: Array, x: Array, linear: Linear) -> Array:
        """``residual`` plus ``x`` times an output matrix."""
        if self.is_plain:
            return self.ops.add_product(residual, x, linear)
        return self.add(residual, self.ops.linear(x, linear))

    def add(self, residual: Array, result: Array) -> Array:
        """``residual`` plus a branch's result, both [T, E]."""
        result = self.ops.normed(result, self.post_norm)
        return residual + (result if self.scale == 1 else result * self.scale)


def shapes(linears: Mapping[str, Linear | None]) -> str:
    """The shapes (out, in) of named matrices, as "q 64x32 k 32x32"."""
    weights = {name: linear.weight for name, linear in linears.items() if linear is not None}
    return " ".join(f"{name} {weight.n_out}x{weight.n_in}" for name, weight in weights.items())
