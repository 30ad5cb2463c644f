"""What gemma3n has around its blocks: several residual streams (AltUp), LAuReL, and embeddings for each layer.

Shapes: T tokens, E embedding width, N streams, P width of a layer's own embedding, R rank of LAuReL, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slm_core.architectures import AnyActivation
from slm_native.kernels import AltUp, KernelSet, Laurel, LayerEmbedding, Linear, Norm, Weight
from slm_native.kv import Array


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbeddings:
    """Where the blocks' own embeddings come from: a table, and the model's embedding."""

    table: Weight  # (V, L*P)
    project: Linear  # (L*P, E)
    norm: Norm  # [P]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """How one stream becomes several, and one again."""

    active: int
    spread: Sequence[Linear]  # [N-1] of (E, E)
    merge: Sequence[Linear]  # [N-1] of (E, E)


def spread(kernels: KernelSet, weights: Streams | None, x: Array) -> list[Array]:
    """The streams [N] of ``x`` [T, E], all of its magnitude; ``x`` alone, where there is no AltUp."""
    if weights is None:
        return [x]
    return [x, *(kernels.as_large(made, x) for made in kernels.project(x, None, weights.spread))]


def merged(kernels: KernelSet, weights: Streams | None, streams: Sequence[Array]) -> Array:
    """The mean of the streams, brought to the magnitude of the first; of one alone, itself."""
    if weights is None or len(streams) == 1:
        return streams[0]
    total = streams[0]
    for stream, linear in zip(streams[1:], weights.merge, strict=True):
        total = total + kernels.as_large(kernels.linear(stream, linear), streams[0])
    return total * (1 / len(streams))


def predicted(kernels: KernelSet, weights: AltUp, streams: Sequence[Array], active: int) -> Sequence[Array]:
    """The streams as they are expected behind the block: each, and a mixture of all that the active one chooses."""
    return kernels.mixed(streams, kernels.linear(_modalities(kernels, weights, streams[active]), weights.predict))


def corrected(
    kernels: KernelSet,
    weights: AltUp,
    embedding: LayerEmbedding,
    guessed: Sequence[Array],
    made: Array,
    own: Array,
    active: int,
    activation: AnyActivation,
) -> list[Array]:
    """The streams behind a block: corrected by what it made beyond what was expected, and its embedding let in.

    Args:
        kernels: the arithmetic.
        weights: of the block.
        embedding: how it lets its own embedding in; the first stream does without.
        guessed: what ``predicted`` gave, [N] of [T, E].
        made: what the block made of the active stream, [T, E].
        own: its embedding of the tokens, [T, P].
        active: which stream it ran on.
        activation: of the gate of its embedding.
    """
    shares = kernels.linear(_modalities(kernels, weights, made), weights.correct)  # [T, N]
    news = made + guessed[active] * -1
    streams = [stream + news * (shares[:, i : i + 1] + 1) for i, stream in enumerate(guessed)]
    added = let_in(kernels, embedding, streams[active] * weights.scale, own, activation)
    return [streams[0], *(stream + added for stream in streams[1:])]


def learned_residual(kernels: KernelSet, weights: Laurel, x: Array) -> Array:
    """``x`` [T, E] and its projection of low rank."""
    return x + kernels.normed(kernels.linear(kernels.linear(x, weights.left), weights.right), weights.norm)


def layer_embeddings(
    kernels: KernelSet, weights: LayerEmbeddings, tokens: Array, x: Array, width: int
) -> Sequence[Array]:
    """Each block's own embedding [T, P] of ``tokens`` [T], whose embedding in the model is ``x`` [T, E]."""
    looked_up = kernels.embed(weights.table, tokens)  # [T, L*P]
    made = kernels.linear(x, weights.project)  # to be scaled by E ** -0.5, which to its norm is another epsilon
    norm = replace(weights.norm, eps=weights.norm.eps * x.shape[1])
    return kernels.part_embeddings(made, looked_up, norm, 2**-0.5, (width / 2) ** 0.5)


def let_in(kernels: KernelSet, weights: LayerEmbedding, x: Array, embedding: Array, activation: AnyActivation) -> Array:
    """What a block's own embedding [T, P] adds to ``x`` [T, E]."""
    gated = kernels.gated(kernels.linear(x, weights.gate), embedding, activation)
    return kernels.normed(kernels.linear(gated, weights.project), weights.norm)


def _modalities(kernels: KernelSet, weights: AltUp, x: Array) -> Array:
    """What the router makes of a stream, from -1 to 1, [T, N]."""
    return kernels.softcap(kernels.linear(kernels.normed(x, weights.router_norm) * (1 / x.shape[1]), weights.router), 1)
