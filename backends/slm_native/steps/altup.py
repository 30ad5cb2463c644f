"""Extra steps of gemma3n and gemma4 layers: residual streams (AltUp), LAuReL, per-layer embeddings.

Shapes: T tokens, E embedding width, N residual streams, P width of a per-layer embedding, R rank of LAuReL, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slm_core.architectures import AnyActivation
from slm_native.kernels.altup import AltUp, AltUpOps, Laurel, LayerEmbedding
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Linear, Norm, Weight
from slm_native.kv import Array
from slm_native.steps.base import Hidden, Step, StepInputs, output_rows, run_steps, shapes


@dataclass(frozen=True, slots=True, eq=False)
class SpreadStep(Step):
    """Makes N residual streams from one, all scaled to the magnitude of the first.

    Attributes:
        ops: the kernel set.
        linears: projections of streams 1 to N-1, (E, E) each.
    """

    ops: AltUpOps
    linears: Sequence[Linear]

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """One stream [T, E] in, N streams out."""
        return [x, *(self.ops.as_large(projected, x) for projected in self.ops.project(x, None, self.linears))]

    def describe(self) -> str:
        """See ``Step``."""
        return f"AltUp: 1 residual stream to {len(self.linears) + 1}"


@dataclass(frozen=True, slots=True, eq=False)
class MergeStep(Step):
    """The mean of N residual streams, each scaled to the magnitude of the first.

    Attributes:
        ops: the kernel set.
        linears: projections of streams 1 to N-1, (E, E) each.
    """

    ops: AltUpOps
    linears: Sequence[Linear]

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """N streams [T, E] in, one out."""
        first, *others = x
        if not others or len(first) == 0:
            return first
        total = first
        for stream, linear in zip(others, self.linears, strict=True):
            total = total + self.ops.as_large(self.ops.linear(stream, linear), first)
        return total * (1 / len(x))

    def describe(self) -> str:
        """See ``Step``."""
        return f"AltUp: {len(self.linears) + 1} residual streams to 1"


@dataclass(frozen=True, slots=True, eq=False)
class AltUpStep(Step):
    """AltUp: the layer runs on one of N residual streams; the others are predicted before it and corrected after it.

    Attributes:
        ops: the kernel set.
        layer: number of the layer.
        is_last: whether it is the model's last layer.
        active: index of the stream on which the layer runs.
        weights: the predictor, the corrector and the router.
        embedding: the gate and projection of the per-layer embedding, which is added to all streams but the first.
        activation: activation of the gate.
        steps: the layer itself.
    """

    ops: AltUpOps
    layer: int
    is_last: bool
    active: int
    weights: AltUp
    embedding: LayerEmbedding
    activation: AnyActivation
    steps: Sequence[Step]

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """N streams in, N streams out; the result has no rows if the output mask has none."""
        predicted = self.predict(x)
        activated = run_steps(self.steps, predicted[self.active], inputs)
        if len(activated) == 0:
            return [activated]
        layer_embedding = inputs.layer_embeddings[self.layer]
        assert layer_embedding is not None, "AltUp has embeddings for each layer"
        layer_embedding, *predicted = (
            output_rows(self.ops, each, inputs, is_last=self.is_last) for each in (layer_embedding, *predicted)
        )
        return self.correct(predicted, activated, layer_embedding)

    def predict(self, streams: Sequence[Array]) -> Sequence[Array]:
        """Predict the streams after the layer: each plus a weighted sum of all; the active stream gives the weights."""
        return self.ops.add_shares(
            streams, self.ops.linear(self._modalities(streams[self.active]), self.weights.predict)
        )

    def correct(self, predicted: Sequence[Array], activated: Array, layer_embedding: Array) -> list[Array]:
        """Correct the streams by the prediction error of the active stream, and add the per-layer embedding.

        Args:
            predicted: the result of ``predict``, N of [T, E].
            activated: the layer's output for the active stream [T, E].
            layer_embedding: the per-layer embedding of the tokens [T, P].
        """
        shares = self.ops.linear(self._modalities(activated), self.weights.correct)  # [T, N]
        innovation = activated + predicted[self.active] * -1
        streams = [stream + innovation * (shares[:, i : i + 1] + 1) for i, stream in enumerate(predicted)]
        scaled = streams[self.active] * self.weights.scale
        added = let_in(self.ops, self.embedding, scaled, layer_embedding, self.activation)
        return [streams[0], *(stream + added for stream in streams[1:])]

    def _modalities(self, x: Array) -> Array:
        """The router's output for a stream, from -1 to 1, [T, N]."""
        ops, weights = self.ops, self.weights
        normed = ops.normed(x, weights.router_norm) * (1 / x.shape[1])
        return ops.softcap(ops.linear(normed, weights.router), 1)

    def describe(self) -> str:
        """See ``Step``."""
        return f"AltUp, stream {self.active}: " + "; ".join(step.describe() for step in self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class LaurelStep(Step):
    """Attention plus a learned residual: ``(attention(x) + y + norm(right(left(y)))) / sqrt(2)``, y the normed x.

    Attributes:
        ops: the kernel set.
        is_last: whether it is in the model's last layer.
        attention: adds attention's output to the residual stream.
        norm: norm of the layer's input [E].
        weights: weights of the learned residual.
    """

    ops: Ops
    is_last: bool
    attention: Step
    norm: Norm | None
    weights: Laurel

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        after = self.attention.run(x, inputs)
        if len(after) == 0:
            return after
        ops, weights = self.ops, self.weights
        y = ops.normed(output_rows(ops, x, inputs, is_last=self.is_last), self.norm)
        low_rank = ops.linear(ops.linear(y, weights.left), weights.right)
        return (after + (y + ops.normed(low_rank, weights.norm))) * 2**-0.5

    def describe(self) -> str:
        """See ``Step``."""
        return (
            f"{self.attention.describe()} | LAuReL {shapes({'left': self.weights.left, 'right': self.weights.right})}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbeddingStep(Step):
    """Adds a per-layer embedding: ``x + norm(project(activation(gate(x)) * embedding))``.

    Attributes:
        ops: the kernel set.
        layer: number of the layer.
        is_last: whether it is the model's last layer.
        weights: the gate and the projection.
        activation: activation of the gate.
    """

    ops: Ops
    layer: int
    is_last: bool
    weights: LayerEmbedding
    activation: AnyActivation

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        layer_embedding = inputs.layer_embeddings[self.layer]
        assert layer_embedding is not None, "the model has embeddings for each layer"
        layer_embedding = output_rows(self.ops, layer_embedding, inputs, is_last=self.is_last)
        return x + let_in(self.ops, self.weights, x, layer_embedding, self.activation)

    def describe(self) -> str:
        """See ``Step``."""
        return "layer embedding " + shapes({"gate": self.weights.gate, "project": self.weights.project})


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbeddingTable:
    """The per-layer embeddings: a table of all layers, plus a projection of the model's embedding."""

    table: Weight  # (V, L*P)
    project: Linear  # (L*P, E)
    norm: Norm  # [P]

    def look_up(self, ops: AltUpOps, tokens: Array, x: Array, width: int) -> Sequence[Array]:
        """The embeddings [T, P] of ``tokens`` [T] for each layer [L]; ``x`` [T, E] is the model's embedding of them."""
        looked_up = ops.embed(self.table, tokens)  # [T, L*P]
        projected = ops.linear(x, self.project)  # not scaled by E ** -0.5: the epsilon of the norm includes that factor
        norm = replace(self.norm, eps=self.norm.eps * x.shape[1])
        return ops.split_layer_embeddings(projected, looked_up, norm, 2**-0.5, (width / 2) ** 0.5)


def let_in(ops: Ops, weights: LayerEmbedding, x: Array, embedding: Array, activation: AnyActivation) -> Array:
    """The term that a per-layer embedding [T, P] adds to ``x`` [T, E]."""
    gated = ops.gated(ops.linear(x, weights.gate), embedding, activation)
    return ops.normed(ops.linear(gated, weights.project), weights.norm)
