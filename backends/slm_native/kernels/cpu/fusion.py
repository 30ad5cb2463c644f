"""The cpu tier's peephole pass: the steps of a layer, and neighbouring layers, become one call into C++.

Shapes: T tokens of the batch, B sequences, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from slm_core.architectures import Activation, AnyActivation, RopeStyle
from slm_native.kernels.altup import LayerEmbedding
from slm_native.kernels.cpu.handles import (
    changed_linears,
    extension,
    native_activation,
    native_linears,
    native_norm,
    optional_norm,
)
from slm_native.kernels.cpu.pages import CpuKvLayer, CpuPlan
from slm_native.kernels.cpu.prepared import CpuMoe, CpuPerHead
from slm_native.kernels.cpu.recurrent import native_rwkv_block
from slm_native.kernels.parameters import LatentAttention, Linear, Norm, Rotation
from slm_native.kv import KvLayer
from slm_native.states import in_order
from slm_native.steps import (
    AltUpStep,
    FfnStep,
    Hidden,
    HybridStep,
    LaurelStep,
    LayerEmbeddingStep,
    MoeStep,
    MultiHeadLatentAttention,
    ParallelStep,
    PlanKind,
    RwkvStep,
    ScaleStep,
    SelfAttention,
    SharedKvAttention,
    Step,
    StepInputs,
    run_steps,
)

if TYPE_CHECKING:
    from slm_native import _native


FusibleAttention: TypeAlias = SelfAttention | SharedKvAttention | MultiHeadLatentAttention


class LayerParts(NamedTuple):
    """The steps of a layer that one call computes, in order.

    Attributes:
        attention: the attention.
        laurel: LAuReL, parallel to attention.
        feed_forward: the feed-forward layer; None if the call ends after attention.
        is_parallel: whether the feed-forward layer reads the layer's input.
        embedding: adds the per-layer embedding.
        scale: factor on the layer's output.
        altup: predicts and corrects residual streams before and after all of these.
    """

    attention: FusibleAttention
    laurel: LaurelStep | None = None
    feed_forward: FfnStep | MoeStep | None = None
    is_parallel: bool = False
    embedding: LayerEmbeddingStep | None = None
    scale: ScaleStep | None = None
    altup: AltUpStep | None = None


class NativeLayer(NamedTuple):
    """A layer in C++, or its attention alone.

    Attributes:
        native: the layer.
        layer: its number in the model.
        cache: number of the KV cache that it reads.
        has_embedding: whether it reads a per-layer embedding.
    """

    native: _native.Layer
    layer: int
    cache: int
    has_embedding: bool


@dataclass(frozen=True, slots=True, eq=False)
class CpuLayers(Step):
    """A fused layer group: neighbouring layers in one call.

    Attributes:
        kernels: the tier's kernels.
        layers: the layers.
        plan: the kind of plan of all layers.
        has_streams: whether its input and output are AltUp's residual streams.
        is_last: whether it includes the model's last layer.
        steps: the steps that it replaces.
    """

    kernels: _native.Kernels
    layers: Sequence[NativeLayer]
    plan: PlanKind
    has_streams: bool
    is_last: bool
    steps: Sequence[Step]

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """Runs without the GIL from the first layer to the last; as single steps if keys have attention biases."""
        plan = inputs.plans[self.layers[0].layer]
        assert isinstance(plan, CpuPlan), "a plan that another kernel set placed"
        if plan.has_biases:
            return run_steps(self.steps, x, inputs)
        streams = [np.ascontiguousarray(stream) for stream in (x if self.has_streams else [x])]
        rotations = [inputs.positions[layer.layer].rotation for layer in self.layers]
        different = {id(rotation): rotation for rotation in rotations}
        angles_of = {key: _angles(rotation, len(streams[0])) for key, rotation in different.items()}
        angles = [angles_of[id(rotation)] for rotation in rotations]
        caches = [_native_cache(inputs.caches[layer.cache]) for layer in self.layers]
        embeddings = inputs.layer_embeddings
        layer_embeddings = [embeddings[layer.layer] if layer.has_embedding else None for layer in self.layers]
        mask = inputs.output_mask if self.is_last else None
        tokens, rows = (plan.pages, plan.slots, plan.native), None if mask is None else np.flatnonzero(mask).tolist()
        outputs = self.kernels.run_layers(
            streams, [layer.native for layer in self.layers], caches, angles, layer_embeddings, *tokens, rows
        )
        return list(outputs) if self.has_streams else outputs[0]

    def joined(self, other: CpuLayers) -> CpuLayers:
        """Both groups as one, this one first."""
        layers, steps = (*self.layers, *other.layers), (*self.steps, *other.steps)
        return replace(self, layers=layers, steps=steps, is_last=other.is_last)

    def describe(self) -> str:
        """See ``Step``."""
        return f"one call: {'; '.join(step.describe() for step in self.steps)}"


@dataclass(frozen=True, slots=True, eq=False)
class CpuRwkvLayers(Step):
    """Neighbouring RWKV-7 layers in one call. In the last layer, single steps if there is an output mask.

    Attributes:
        kernels: the tier's kernels.
        blocks: the layers.
        steps: the steps that it replaces.
    """

    kernels: _native.StateKernels
    blocks: Sequence[_native.RwkvBlock]
    steps: Sequence[RwkvStep]

    @property
    def is_last(self) -> bool:
        """Whether it includes the model's last layer."""
        return self.steps[-1].is_last

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """Runs without the GIL from the first layer to the last; the new states go into ``inputs.groups``."""
        if self.is_last and inputs.output_mask is not None:
            return run_steps(self.steps, x, inputs)
        ops, outputs = self.steps[0].ops, []
        for group in inputs.groups:
            rows = ops.rows(x, group.rows)
            batched = np.ascontiguousarray(rows.reshape(len(group.before), -1, rows.shape[-1]))
            before = [group.parts(step.state, ops) for step in self.steps]
            first_value = group.carried[0] if group.carried else None
            y, values, after = self.kernels.rwkv_blocks(batched, list(self.blocks), before, first_value)
            if first_value is None:
                group.carried.append(values)
            group.after.extend(after)
            outputs.append(y.reshape(rows.shape))
        return in_order(ops, inputs.groups, outputs)

    def joined(self, other: CpuRwkvLayers) -> CpuRwkvLayers:
        """Both groups as one, this one first."""
        return replace(self, blocks=(*self.blocks, *other.blocks), steps=(*self.steps, *other.steps))

    def describe(self) -> str:
        """See ``Step``."""
        return f"one call: {'; '.join(step.describe() for step in self.steps)}"


class Fusion:
    """The peephole pass.

    Args:
        kernels: C++ kernels of layers.
        states: C++ kernels of recurrent layers.
    """

    def __init__(self, kernels: _native.Kernels, states: _native.StateKernels) -> None:
        self._kernels = kernels
        self._states = states

    def fuse(self, steps: Sequence[Step]) -> list[Step]:
        """Replace neighbouring steps by one call if all their matrices have kernels."""
        fused: list[Step] = []
        index = 0
        while index < len(steps):
            step, n_steps = self._fused_at(steps, index)
            last = fused.pop() if fused else None
            fused += [step] if last is None else _joined(last, step)
            index += n_steps
        return fused

    def _fused_at(self, steps: Sequence[Step], index: int) -> tuple[Step, int]:
        """The longest call that begins at a step, and its number of steps; the step itself if there is no call."""
        step = steps[index]
        parts, n_steps = layer_at(steps, index)
        if parts is not None and (whole := self._layers(parts, steps[index : index + n_steps])) is not None:
            return whole, n_steps
        if isinstance(step, RwkvStep):
            return self._rwkv(step), 1
        if isinstance(step, AltUpStep):
            return replace(step, steps=self.fuse(step.steps)), 1
        if isinstance(step, ParallelStep | HybridStep):
            return replace(step, attention=self._attention(step.attention)), 1
        return self._attention(step), 1

    def _attention(self, step: Step) -> Step:
        """An attention step as one call; any other step unchanged."""
        alone = attention_of(step)
        return step if alone is None else self._layers(alone, [step]) or step

    def _layers(self, parts: LayerParts, steps: Sequence[Step]) -> CpuLayers | None:
        native, attention = native_layer(parts), parts.attention
        if native is None or attention.cache is None:
            return None
        has_embedding = parts.embedding is not None or parts.altup is not None
        layer = NativeLayer(native, attention.layer, attention.cache, has_embedding)
        properties = attention.plan, parts.altup is not None, attention.is_last
        return CpuLayers(self._kernels, [layer], *properties, steps)

    def _rwkv(self, step: RwkvStep) -> Step:
        native = native_rwkv_block(step.block)
        return step if native is None else CpuRwkvLayers(self._states, [native], [step])


def _joined(before: Step, after: Step) -> list[Step]:
    """Two neighbouring steps; one call if they can be joined."""
    match before, after:
        case CpuLayers(), CpuLayers() if (before.plan, before.has_streams) == (after.plan, after.has_streams):
            return [before.joined(after)]
        case CpuRwkvLayers(), CpuRwkvLayers() if not after.is_last:
            return [before.joined(after)]
    return [before, after]


def layer_at(steps: Sequence[Step], index: int) -> tuple[LayerParts | None, int]:
    """A layer's attention, feed-forward layer and following steps, and their number; None if there is no call for them.

    Args:
        steps: the steps of all layers.
        index: index of the attention.
    """
    following: list[Step] = list(steps[index + 1 : index + 4])
    match steps[index]:
        case AltUpStep() as altup:
            inner, n_steps = layer_at(altup.steps, 0)
            return (None, 1) if inner is None or n_steps < len(altup.steps) else (inner._replace(altup=altup), 1)
        case ParallelStep() as parallel:
            parts, n_steps = attention_of(parallel.attention), 1
            feed_forward: Step | None = parallel.feed_forward
        case step:
            parts, n_steps = attention_of(step), 2
            feed_forward = following.pop(0) if following else None
    if parts is None or not isinstance(feed_forward, FfnStep | MoeStep):
        return None, 1
    parts = parts._replace(feed_forward=feed_forward, is_parallel=n_steps == 1)
    if following and isinstance(embedding := following[0], LayerEmbeddingStep):
        parts, n_steps, following = parts._replace(embedding=embedding), n_steps + 1, following[1:]
    if following and isinstance(scale := following[0], ScaleStep):
        parts, n_steps = parts._replace(scale=scale), n_steps + 1
    return parts, n_steps


def attention_of(step: Step) -> LayerParts | None:
    """The parts of a layer that consists of one attention step; None if C++ has no call for the step."""
    laurel = step if isinstance(step, LaurelStep) else None
    attention = step if laurel is None else laurel.attention
    if not isinstance(attention, FusibleAttention) or attention.has_temperature:
        return None
    return LayerParts(attention, laurel)


def native_layer(parts: LayerParts) -> _native.Layer | None:
    """A layer in C++; None if one of its matrices has no kernel."""
    attention, altup, embedding = parts.attention, parts.altup, _embedding(parts)
    latent = native_latent(attention.weights) if isinstance(attention, MultiHeadLatentAttention) else None
    moe = parts.feed_forward.moe if isinstance(parts.feed_forward, MoeStep) else None
    if moe is not None and not isinstance(moe, CpuMoe):
        return None
    linears = native_linears(*_linears(parts))
    extras = None if altup is None else native_altup(altup), None if embedding is None else native_embedding(embedding)
    needed = isinstance(attention, MultiHeadLatentAttention), altup is not None, embedding is not None
    if linears is None or any(
        is_needed and native is None for is_needed, native in zip(needed, (latent, *extras), strict=True)
    ):
        return None
    scoring, dense = attention.scoring, parts.feed_forward if isinstance(parts.feed_forward, FfnStep) else None
    limit = attention.qkv_limit if isinstance(attention, SelfAttention) else None
    native: _native.Layer = extension().Layer(
        linears,
        [optional_norm(norm) for norm in _norms(parts)],
        native_activation(_activation(parts)),
        *(attention.head_dim, attention.scale),
        *(scoring.softcap or 0.0, scoring.window or 0, scoring.slopes, scoring.sinks),
        *(limit or 0.0, attention.residual.scale, parts.is_parallel, None if dense is None else dense.gate_threshold),
        *(latent, None if moe is None else moe.native, *extras),
        1.0 if parts.scale is None else float(parts.scale.factor[0]),
    )
    return native


def native_altup(step: AltUpStep) -> _native.AltUp | None:
    """AltUp in C++; None if one of its matrices has no kernel."""
    weights = step.weights
    linears = native_linears(weights.router, weights.predict, weights.correct)
    if linears is None or changed_linears(weights.router, weights.predict, weights.correct):
        return None
    router, *mixing = linears
    norm = replace(weights.router_norm, weight=weights.router_norm.weight / np.float32(weights.router.weight.n_in))
    altup: _native.AltUp = extension().AltUp(router, native_norm(norm), *mixing, weights.scale, step.active)
    return altup


def native_embedding(embedding: LayerEmbedding) -> _native.LayerEmbedding | None:
    """A per-layer embedding in C++; None if one of its matrices has no kernel."""
    linears = native_linears(embedding.gate, embedding.project)
    if linears is None or changed_linears(embedding.gate, embedding.project):
        return None
    native: _native.LayerEmbedding = extension().LayerEmbedding(*linears, native_norm(embedding.norm))
    return native


def native_latent(latent: LatentAttention) -> _native.Latent | None:
    """Latent attention in C++; None if one of its matrices has no kernel."""
    linears = native_linears(latent.q_down, latent.q, latent.kv_down)
    if linears is None or not isinstance(latent.k_up, CpuPerHead) or not isinstance(latent.v_up, CpuPerHead):
        return None
    q_down, q, kv_down = linears
    norms = optional_norm(latent.q_norm), optional_norm(latent.kv_norm)
    native: _native.Latent = extension().Latent(
        *(q_down, norms[0], q, kv_down, norms[1]), latent.k_up.weights, latent.v_up.weights
    )
    return native


def _linears(parts: LayerParts) -> list[Linear | None]:
    """q, k, v, output, gate, up, down, and both matrices of LAuReL."""
    attention, step = parts.attention, parts.feed_forward
    weights = attention.weights
    heads = (None, None, None) if isinstance(weights, LatentAttention) else (weights.q, weights.k, weights.v)
    dense = (step.weights.gate, step.weights.up, step.weights.down) if isinstance(step, FfnStep) else (None, None, None)
    laurel = (None, None) if parts.laurel is None else (parts.laurel.weights.left, parts.laurel.weights.right)
    return [*heads, weights.output, *dense, *laurel]


def _norms(parts: LayerParts) -> list[Norm | None]:
    """The norms of the input, of q, k and v, after attention, before and after the feed-forward layer, of LAuReL."""
    attention, step = parts.attention, parts.feed_forward
    weights = attention.weights
    heads = (None,) * 3 if isinstance(weights, LatentAttention) else (weights.q_norm, weights.k_norm, weights.v_norm)
    feed_forward = (None, None) if step is None else (step.norm, step.residual.post_norm)
    laurel = None if parts.laurel is None else parts.laurel.weights.norm
    return [attention.norm, *heads, attention.residual.post_norm, *feed_forward, laurel]


def _activation(parts: LayerParts) -> AnyActivation:
    """The activation of the feed-forward layer; the gate of the per-layer embedding has the same."""
    step = parts.altup or parts.embedding or parts.feed_forward
    return Activation.SILU if step is None or isinstance(step, MoeStep) else step.activation


def _embedding(parts: LayerParts) -> LayerEmbedding | None:
    if parts.altup is not None:
        return parts.altup.embedding
    return None if parts.embedding is None else parts.embedding.weights


def _angles(rotation: Rotation | None, n_tokens: int) -> _native.Angles:
    none = np.empty((n_tokens, 0), np.float32)
    cos, sin = (none, none) if rotation is None else (rotation.cos, rotation.sin)
    interleaved = rotation is not None and rotation.style is RopeStyle.INTERLEAVED
    angles: _native.Angles = extension().Angles.of(cos, sin, interleaved)
    return angles


def _native_cache(cache: KvLayer) -> _native.CacheLayer:
    assert isinstance(cache, CpuKvLayer), "pages that another kernel set made"
    return cache.native
