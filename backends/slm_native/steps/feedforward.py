"""Feed-forward layers: dense, MoE, and a dense layer parallel to an MoE layer.

Shapes: T tokens of the batch, E embedding width, F feed-forward width.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from slm_core.architectures import AnyActivation
from slm_native.kernels.moe import MoeLayer
from slm_native.kernels.parameters import FeedForward, Norm
from slm_native.kv import Array
from slm_native.steps.base import Hidden, Residual, Step, StepInputs, output_rows, shapes


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardStep(Step):
    """A layer that computes each token independently.

    Attributes:
        norm: norm of its input [E].
        residual: adds the result to the residual stream.
    """

    norm: Norm | None
    residual: Residual

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return self.add(x, x)

    @abstractmethod
    def add(self, residual: Array, x: Array) -> Array:
        """``residual`` plus the layer's output for ``x``, both [T, E]."""


@dataclass(frozen=True, slots=True, eq=False)
class FfnStep(FeedForwardStep):
    """``residual + down(activation(gate(norm(x))) * up(norm(x)))``; without a gate, ``down(activation(up(norm(x))))``.

    Attributes:
        weights: the matrices of the layer.
        activation: activation of the gate; without a gate, of ``up``.
        gate_threshold: see ``Ops.gate_up``.
    """

    weights: FeedForward
    activation: AnyActivation
    gate_threshold: float | None

    def add(self, residual: Array, x: Array) -> Array:
        """See ``FeedForwardStep``."""
        weights = self.weights
        settings = self.activation, self.gate_threshold
        inner = self.residual.ops.gate_up(x, self.norm, weights.gate, weights.up, *settings)  # [T, F]
        return self.residual.add_product(residual, inner, weights.down)

    def describe(self) -> str:
        """See ``Step``."""
        weights = self.weights
        return "feed-forward " + shapes({"gate": weights.gate, "up": weights.up, "down": weights.down})


@dataclass(frozen=True, slots=True, eq=False)
class MoeStep(FeedForwardStep):
    """``residual + moe(norm(x))``: a router chooses a few experts for each token.

    Attributes:
        moe: the router and the experts.
        n_experts: the number of experts.
        n_used: the number of experts per token.
    """

    moe: MoeLayer
    n_experts: int
    n_used: int

    def add(self, residual: Array, x: Array) -> Array:
        """See ``FeedForwardStep``."""
        return self.residual.add(residual, self.moe.run(x, self.norm))

    def describe(self) -> str:
        """See ``Step``."""
        return f"MoE {self.n_used} of {self.n_experts} experts"


@dataclass(frozen=True, slots=True, eq=False)
class DenseAndMoeStep(FeedForwardStep):
    """A dense layer and an MoE layer with the same input; each result is normalized (gemma4).

    Attributes:
        dense: weights of the dense layer.
        activation: activation of the dense layer.
        dense_norm: norm of the dense layer's result [E].
        moe: the router and the experts.
        router_norm: norm of the router's input [E].
        moe_norm: norm of the experts' input [E].
        moe_result_norm: norm of the experts' result [E].
    """

    dense: FeedForward
    activation: AnyActivation
    dense_norm: Norm | None
    moe: MoeLayer
    router_norm: Norm
    moe_norm: Norm | None
    moe_result_norm: Norm | None

    def add(self, residual: Array, x: Array) -> Array:
        """See ``FeedForwardStep``."""
        ops = self.residual.ops
        dense = ops.feed_forward(ops.normed(x, self.norm), self.dense, self.activation)
        mixed = self.moe.run(x, self.moe_norm, ops.normed(x, self.router_norm))
        result = ops.normed(dense, self.dense_norm) + ops.normed(mixed, self.moe_result_norm)
        return self.residual.add(residual, result)

    def describe(self) -> str:
        """See ``Step``."""
        return "feed-forward and MoE " + shapes({"up": self.dense.up, "down": self.dense.down})


@dataclass(frozen=True, slots=True, eq=False)
class ParallelStep(Step):
    """Attention and feed-forward layer both read the layer's input; both outputs are added to it (GPT-J).

    Attributes:
        attention: attention or a recurrent layer.
        feed_forward: the parallel layer.
        is_last: whether it is the model's last layer.
    """

    attention: Step
    feed_forward: FeedForwardStep
    is_last: bool

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        after = self.attention.run(x, inputs)
        if len(after) == 0:
            return after
        ops = self.feed_forward.residual.ops
        return self.feed_forward.add(after, output_rows(ops, x, inputs, is_last=self.is_last))

    def describe(self) -> str:
        """See ``Step``."""
        return f"parallel: {self.attention.describe()} | {self.feed_forward.describe()}"
