"""A layer as one flat record, so that tests can change one field at a time, and its fused form on the cpu tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import Activation, AnyActivation, LatentSpec
from slm_native import _extension
from slm_native.kernels import (
    PLAIN,
    AltUp,
    Attention,
    FeedForward,
    KernelSet,
    LatentAttention,
    Laurel,
    LayerEmbedding,
    Linear,
    MoeLayer,
    Norm,
    Rotation,
    Scoring,
)
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.cpu.fusion import CpuLayers, native_latent
from slm_native.kernels.cpu.handles import native_activation, native_linears, native_norm
from slm_native.kernels.cpu.pages import CpuKvLayer, CpuPlan
from slm_native.kv import BatchPlan, KvLayer
from slm_native.positions import LayerPositions
from slm_native.steps import (
    AltUpStep,
    FeedForwardStep,
    FfnStep,
    LaurelStep,
    LayerEmbeddingStep,
    MoeStep,
    MultiHeadLatentAttention,
    ParallelStep,
    Residual,
    ScaleStep,
    SelfAttention,
    SharedKvAttention,
    Step,
    StepInputs,
)

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class FlatLayer:
    """All parts of a layer that one fused call can compute; None for absent parts. Steps use the same names."""

    attn_norm: Norm | None
    head_dim: int
    scale: float
    output: Linear
    scoring: Scoring = PLAIN
    attn_post_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    q: Linear | None = None
    k: Linear | None = None
    v: Linear | None = None
    qkv_limit: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    latent: LatentAttention | None = None
    latent_spec: LatentSpec | None = None
    laurel: Laurel | None = None
    ffn_norm: Norm | None = None
    gate: Linear | None = None
    up: Linear | None = None
    gate_threshold: float | None = None
    activation: AnyActivation = Activation.SILU
    down: Linear | None = None
    moe: MoeLayer | None = None
    ffn_post_norm: Norm | None = None
    altup: AltUp | None = None
    active_stream: int = 0
    embedding: LayerEmbedding | None = None
    output_scale: Rows | None = None

    def attention_only(self) -> FlatLayer:
        """The attention of the layer, without AltUp, layer embedding and output scale."""
        only_attention = replace(self, ffn_norm=None, gate=None, up=None, gate_threshold=None, down=None, moe=None)
        return replace(only_attention, ffn_post_norm=None, altup=None, embedding=None, output_scale=None)

    def steps(self, kernels: KernelSet, index: int = 0, *, is_last: bool = True) -> list[Step]:
        """The steps of the layer; ``index`` is the number of the layer and of its KV cache."""
        attention, feed_forward = self._attention(kernels, index, is_last), self._feed_forward(kernels)
        steps: list[Step] = [attention]
        if feed_forward is not None:
            steps = [ParallelStep(attention, feed_forward, is_last)] if self.parallel else [attention, feed_forward]
        scales = [] if self.output_scale is None else [ScaleStep(self.output_scale)]
        first_arguments: tuple[Any, ...] = kernels, index, is_last
        if self.altup is not None:
            altup_arguments: tuple[Any, ...] = self.active_stream, self.altup, self.embedding, self.activation
            return [AltUpStep(*first_arguments, *altup_arguments, [*steps, *scales])]
        if self.embedding is not None:
            steps.append(LayerEmbeddingStep(*first_arguments, self.embedding, self.activation))
        return [*steps, *scales]

    def _attention(self, kernels: KernelSet, index: int, is_last: bool) -> Step:
        residual = Residual(kernels, self.attn_post_norm, self.residual_scale)
        heads = self.head_dim, self.scale, self.scoring
        shared: tuple[Any, ...] = index, is_last, self.attn_norm, residual, *heads, None, index, False
        weights: Any = self.q, self.k, self.v, self.q_norm, self.k_norm, self.v_norm, self.output, None
        step: Step
        if self.latent is not None:
            spec: Any = self.latent_spec
            step = MultiHeadLatentAttention(*shared, replace(self.latent, output=self.output), spec)
        elif self.k is None:
            step = SharedKvAttention(*shared, Attention(*weights))
        else:
            step = SelfAttention(*shared, Attention(*weights), self.qkv_limit)
        return step if self.laurel is None else LaurelStep(kernels, is_last, step, self.attn_norm, self.laurel)

    def _feed_forward(self, kernels: KernelSet) -> FeedForwardStep | None:
        residual, up, down = Residual(kernels, self.ffn_post_norm, self.residual_scale), self.up, self.down
        if self.moe is not None:
            return MoeStep(self.ffn_norm, residual, self.moe, 5, 2)
        if up is None:
            return None
        dense: Any = self.gate, up, down
        return FfnStep(self.ffn_norm, residual, FeedForward(*dense), self.activation, self.gate_threshold)


class FusedLayers:
    """Layers that the cpu tier fused into one call into C++.

    Args:
        step: the fused step.
    """

    def __init__(self, step: CpuLayers) -> None:
        self.step = step

    def run_unchecked(
        self, streams: Sequence[Rows], plan: BatchPlan, cache: KvLayer, layer_embeddings: Sequence[Rows | None]
    ) -> Any:
        """Pass any residual streams and embeddings to C++, without rotation, with one KV cache for all layers."""
        assert isinstance(plan, CpuPlan) and isinstance(cache, CpuKvLayer)
        layers, no_angles = [each.native for each in self.step.layers], np.empty((len(streams[0]), 0), np.float32)
        angles = [_extension.load().Angles.of(no_angles, no_angles, False)] * len(layers)
        batch = plan.pages, plan.slots, plan.native
        return self.step.kernels.run_layers(
            streams, layers, [cache.native] * len(layers), angles, layer_embeddings, *batch, None
        )

    def run(
        self,
        streams: Sequence[Rows],
        rotations: Sequence[Rotation | None],
        plan: BatchPlan,
        caches: Sequence[KvLayer],
        layer_embeddings: Sequence[Rows | None],
        output_mask: NDArray[np.bool_] | None = None,
    ) -> list[Rows]:
        """The output of the last layer, one array per residual stream."""
        positions = [LayerPositions(rotation, None) for rotation in rotations]
        inputs = StepInputs(positions, [plan] * len(positions), caches, [], layer_embeddings, output_mask)
        if self.step.has_streams:
            return list(self.step.run(streams, inputs))
        (x,) = streams
        return [self.step.run(x, inputs)]


def native_layer_unchecked(layer: FlatLayer) -> Any:
    """A C++ layer of all parts of the record, even if no step combines them."""
    linears = native_linears(layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down, None, None)
    norms = [None if norm is None else native_norm(norm) for norm in (layer.attn_norm, *[None] * 7)]
    native: Any = _extension.load()
    return native.Layer(
        linears,
        norms,
        native_activation(layer.activation),
        *(layer.head_dim, layer.scale),
        *(0.0, 0, None, None),
        *(layer.qkv_limit or 0.0, layer.residual_scale, layer.parallel, layer.gate_threshold),
        None if layer.latent is None else native_latent(layer.latent),
        None if layer.moe is None else layer.moe.native,  # type: ignore[attr-defined]
        *(None, None, 1.0),
    )


def fuse_layers(kernels: CpuKernels, layers: Sequence[FlatLayer]) -> FusedLayers | None:
    """The layers as one fused call; None if the tier needs more than one step."""
    last = len(layers) - 1
    steps = [step for i, layer in enumerate(layers) for step in layer.steps(kernels, i, is_last=i == last)]
    fused = kernels.fuse(steps)
    is_one = len(fused) == 1 and isinstance(fused[0], CpuLayers) and len(fused[0].layers) == len(layers)
    return FusedLayers(fused[0]) if is_one and isinstance(fused[0], CpuLayers) else None
