"""Lowers the weights of each layer to the steps that compute it, once, when a model is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_core.adapters import Direction
from slm_core.architectures import LayerSpec, ModelSpec
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_native.kernels import ChannelMix, FeedForward, KernelSet, LatentAttention, MoeLayer, Rwkv7, RwkvBlock
from slm_native.steps import (
    AltUpStep,
    BidirectionalAttention,
    ControlVectorStep,
    DenseAndMoeStep,
    FeedForwardStep,
    FfnStep,
    HybridStep,
    KeepStep,
    LaurelStep,
    LayerEmbeddingStep,
    MergeStep,
    MoeStep,
    MultiHeadLatentAttention,
    NormStep,
    ParallelStep,
    PlanKind,
    RecurrentStep,
    Residual,
    RwkvStep,
    ScaleStep,
    SelfAttention,
    SharedKvAttention,
    SpreadStep,
    Step,
    TransferStep,
)
from slm_native.weights import Block, DenseAndMoe, Weights


class Lowering:
    """Makes the steps of a model's layers from their weights.

    Args:
        spec: the model's architecture and sizes.
        kernels: the kernel set.
        keeps_windows: whether sliding-window layers have their own plan and cache.
    """

    def __init__(self, spec: ModelSpec, kernels: KernelSet, *, keeps_windows: bool) -> None:
        self._spec = spec
        self._kernels = kernels
        self.plan_kinds = [_plan_kind(layer, keeps_windows=keeps_windows) for layer in spec.layers]
        caches = {block: i for i, block in enumerate(spec.attention_layers)}
        kv_layers = (i if layer.kv_layer is None else layer.kv_layer for i, layer in enumerate(spec.layers))
        self._caches = [caches.get(i) for i in kv_layers]
        counter = itertools.count()
        self._states = [None if layer.recurrent is None else next(counter) for layer in spec.layers]

    def layer(self, index: int, block: Block, weights: Weights) -> list[Step]:
        """The steps of one layer. The first and the last layer include the steps outside the layers.

        Args:
            index: number of the layer.
            block: weights of the layer.
            weights: weights outside the layers.
        """
        first, last = index == 0, index == self._spec.n_layers - 1
        kernels, streams = self._kernels, weights.streams
        steps: list[Step] = [SpreadStep(kernels, streams.spread)] if first and streams is not None else []
        steps += [TransferStep(kernels, index)] if kernels.splits else []
        steps += self._layer(index, block)
        steps += [MergeStep(kernels, streams.merge)] if last and streams is not None else []
        steps += [TransferStep(kernels, self._spec.n_layers)] if last and kernels.splits else []
        return steps

    def with_direction(self, index: int, steps: Sequence[Step], direction: Direction) -> list[Step]:
        """The steps of a layer, with a direction of a control vector added to the output of the layer.

        Args:
            index: number of the layer.
            steps: the result of ``layer``.
            direction: the direction [E].
        """
        tensor = QuantizedTensor(f"blk.{index}.direction", direction.shape, GgmlType.F32, direction.view(np.uint8))
        return self._after_layer(index, steps, ControlVectorStep(self._kernels.vector(tensor)))

    def keeping(self, index: int, steps: Sequence[Step]) -> list[Step]:
        """The steps of a layer, and a step that stores the output of the layer; see ``with_direction``."""
        return self._after_layer(index, steps, KeepStep(self._kernels, index))

    def _after_layer(self, index: int, steps: Sequence[Step], step: Step) -> list[Step]:
        """The steps of a layer, then ``step``, then the steps outside the layers."""
        outside = (MergeStep, TransferStep) if self._is_last(index) else ()  # they follow the last layer
        end = len(steps)
        while end > 0 and isinstance(steps[end - 1], outside):
            end -= 1
        return [*steps[:end], step, *steps[end:]]

    def _layer(self, index: int, block: Block) -> list[Step]:
        if isinstance(block.recurrent, Rwkv7):
            return [self._rwkv(index, block, block.recurrent)]
        layer, kernels, is_last = self._spec.layers[index], self._kernels, self._is_last(index)
        if block.altup is None:
            steps = self._on_one_stream(index, block, layer)
            if block.embedding is not None:
                steps.append(LayerEmbeddingStep(kernels, index, is_last, block.embedding, layer.activation))
            return steps if block.output_scale is None else [*steps, ScaleStep(block.output_scale)]
        assert block.embedding is not None and block.output_scale is None, "as gemma3n has it"
        inner, active = self._on_one_stream(index, block, layer), self._spec.active_stream or 0
        weights = block.altup, block.embedding, layer.activation
        return [AltUpStep(kernels, index, is_last, active, *weights, inner)]

    def _on_one_stream(self, index: int, block: Block, layer: LayerSpec) -> list[Step]:
        """Attention or a recurrent layer, then a feed-forward layer, then norms of the sums if the model has them."""
        mixing, feed_forward = self._mixing(index, block), self._feed_forward(block, layer)
        kernels = self._kernels
        after_mixing = [] if block.attn_sum_norm is None else [NormStep(kernels, block.attn_sum_norm)]
        after = [] if block.ffn_sum_norm is None else [NormStep(kernels, block.ffn_sum_norm)]
        if feed_forward is None:
            return [mixing, *after_mixing, *after]
        if self._spec.parallel:
            assert block.attn_sum_norm is None, "there is no sum between layers that read the same"
            return [ParallelStep(mixing, feed_forward, self._is_last(index)), *after]
        return [mixing, *after_mixing, feed_forward, *after]

    def _mixing(self, index: int, block: Block) -> Step:
        """The step that mixes tokens: attention, a recurrent layer, or both."""
        attention = None if block.attention is None else self._attention(index, block)
        if attention is not None and block.laurel is not None:
            is_last = self._is_last(index)
            attention = LaurelStep(self._kernels, is_last, attention, block.attn_norm, block.laurel)
        if block.recurrent is None:
            assert attention is not None, "a layer mixes tokens"
            return attention
        recurrent, state = block.recurrent, self._states[index]
        assert not isinstance(recurrent, Rwkv7) and state is not None, "the weights were read by this spec"
        residual = self._residual(block.attn_post_norm)
        step = RecurrentStep(self._kernels, state, self._is_last(index), block.attn_norm, residual, recurrent)
        return step if attention is None else HybridStep(attention, step)

    def _attention(self, index: int, block: Block) -> Step:
        spec, layer, weights = self._spec, self._spec.layers[index], block.attention
        shared: dict[str, Any] = {
            "layer": index,
            "is_last": self._is_last(index),
            "norm": block.attn_norm,
            "residual": self._residual(block.attn_post_norm),
            "head_dim": spec.width_of(layer),
            "scale": spec.scale_of(layer),
            "scoring": block.scoring,
            "plan": self.plan_kinds[index],
            "cache": self._caches[index],
            "has_temperature": layer.temperature is not None,
        }
        if isinstance(weights, LatentAttention):
            assert layer.latent is not None and spec.causal, "the weights were read by this spec"
            return MultiHeadLatentAttention(**shared, weights=weights, latent=layer.latent)
        assert weights is not None, "the layer attends"
        if not spec.causal:
            return BidirectionalAttention(**shared, weights=weights)
        if weights.k is None:
            return SharedKvAttention(**shared, weights=weights)
        return SelfAttention(**shared, weights=weights, qkv_limit=spec.qkv_limit)

    def _feed_forward(self, block: Block, layer: LayerSpec) -> FeedForwardStep | None:
        weights, residual = block.feed_forward, self._residual(block.ffn_post_norm)
        if weights is None:
            return None
        if isinstance(weights, FeedForward):
            return FfnStep(block.ffn_norm, residual, weights, layer.activation, layer.gate_threshold)
        assert layer.experts is not None and not isinstance(weights, ChannelMix), "the weights were read by this spec"
        if isinstance(weights, MoeLayer):
            return MoeStep(block.ffn_norm, residual, weights, layer.experts.n_experts, layer.experts.n_used)
        return _dense_and_moe(block, residual, weights, layer)

    def _rwkv(self, index: int, block: Block, time: Rwkv7) -> Step:
        state, channel = self._states[index], block.feed_forward
        assert state is not None and isinstance(channel, ChannelMix), "as RWKV-7 has it"
        assert block.attn_norm is not None and block.ffn_norm is not None, "both mixings have a norm before them"
        rwkv_block = RwkvBlock(block.attn_norm, time, block.ffn_norm, channel)
        return RwkvStep(self._kernels, state, self._is_last(index), rwkv_block)

    def _residual(self, post_norm: Any) -> Residual:
        return Residual(self._kernels, post_norm, self._spec.residual_scale)

    def _is_last(self, index: int) -> bool:
        """Whether only rows of the output mask leave the layer: true for the last layer and for MTP layers."""
        return index >= self._spec.n_layers - 1


def _dense_and_moe(block: Block, residual: Residual, weights: DenseAndMoe, layer: LayerSpec) -> DenseAndMoeStep:
    return DenseAndMoeStep(
        norm=block.ffn_norm,
        residual=residual,
        dense=weights.dense,
        activation=layer.activation,
        dense_norm=weights.dense_norm,
        moe=weights.experts,
        router_norm=weights.router_norm,
        moe_norm=weights.experts_norm,
        moe_result_norm=weights.mixed_norm,
    )


def _plan_kind(layer: LayerSpec, *, keeps_windows: bool) -> PlanKind:
    if layer.chunk is not None:
        return "chunk", layer.chunk
    return ("window", layer.window) if keeps_windows and layer.window is not None else None
