"""Recurrent layers: short convolutions and state spaces (Mamba, Mamba 2). Sequences of equal length run together.

Shapes: B sequences of T tokens each, E embedding width.
"""

from __future__ import annotations

from dataclasses import dataclass

from slm_native.kernels.parameters import Norm
from slm_native.kernels.recurrent import RecurrentOps, RecurrentWeights
from slm_native.kv import Array
from slm_native.states import StateGroup, in_order
from slm_native.steps.base import Hidden, Residual, Step, StepInputs, output_rows, shapes


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStep(Step):
    """``x + output(mixer(project(norm(x))))``, with a state for each sequence.

    Attributes:
        ops: the kernel set.
        state: index of the layer among the recurrent layers.
        is_last: whether it is in the model's last layer.
        norm: norm of the layer's input [E].
        residual: adds the result to the residual stream.
        weights: weights of the layer.
    """

    ops: RecurrentOps
    state: int
    is_last: bool
    norm: Norm | None
    residual: Residual
    weights: RecurrentWeights

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return self.add(output_rows(self.ops, x, inputs, is_last=self.is_last), x, inputs)

    def add(self, residual: Array, x: Array, inputs: StepInputs) -> Array:
        """``residual`` (the rows that leave the layer) plus the layer's output for ``x`` [T of the batch, E].

        The states after the batch are appended to ``inputs.groups``.
        """
        is_whole = not self.is_last or inputs.output_mask is None
        if is_whole and len(inputs.groups) == 1 and self.residual.post_norm is None:
            return self._add_in_one_call(residual, x, inputs.groups[0])
        ops, outputs = self.ops, []
        (projected,) = ops.project(x, self.norm, [self.weights.project])
        for group in inputs.groups:
            rows = ops.rows(projected, group.rows)
            batched = rows.reshape(len(group.before), -1, rows.shape[-1])
            y, after = ops.between_products(self.weights, batched, group.parts(self.state, ops))
            group.after.append(after)
            outputs.append(y.reshape(len(rows), -1))
        mixed = in_order(ops, inputs.groups, outputs)
        if len(residual) == 0:
            return residual
        mixed = output_rows(ops, mixed, inputs, is_last=self.is_last)
        return self.residual.add_product(residual, mixed, self.weights.output)

    def _add_in_one_call(self, residual: Array, x: Array, group: StateGroup) -> Array:
        ops, rows, before = self.ops, group.rows, group.parts(self.state, self.ops)
        if not isinstance(rows, slice):
            x, residual = ops.rows(x, rows), ops.rows(residual, rows)
        y, after = ops.recurrent_layer(self.weights, x, self.norm, residual, self.residual.scale, before)
        group.after.append(after)
        return y if isinstance(rows, slice) else in_order(ops, [group], [y])

    def describe(self) -> str:
        """See ``Step``."""
        linears = {"project": self.weights.project, "output": self.weights.output}
        return f"recurrent ({type(self.weights).__name__}) {shapes(linears)}"


@dataclass(frozen=True, slots=True, eq=False)
class HybridStep(Step):
    """Attention parallel to a recurrent layer: both read the layer's input, both outputs are added (Falcon H1).

    Attributes:
        attention: the layer's attention.
        recurrent: the parallel layer.
    """

    attention: Step
    recurrent: RecurrentStep

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return self.recurrent.add(self.attention.run(x, inputs), x, inputs)

    def describe(self) -> str:
        """See ``Step``."""
        return f"hybrid: {self.attention.describe()} | {self.recurrent.describe()}"
