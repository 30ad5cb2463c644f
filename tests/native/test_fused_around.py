"""Fused layers with more parts: residual streams (AltUp), per-layer embeddings, an output scale, experts.

The oracle is the unfused steps on the same tier. Attention and dense layers have tests of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from native.flat_layers import FlatLayer, fuse_layers, native_layer_unchecked
from random_matrices import random_matrix
from slm_core.architectures import Activation, ExpertsSpec, Gating, NormKind
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType
from slm_native import _extension
from slm_native.kernels import AltUp, Experts, FeedForward, LayerEmbedding, Linear, Norm
from slm_native.kernels.cpu import CpuKernels
from slm_native.kv import BatchPlan, PagedKvCache, PageLayout, codec_of
from slm_native.steps import AltUpStep
from slm_native.steps.altup import let_in

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

Rows = NDArray[np.float32]
WIDTH, HEAD_DIM, N_FF, N_LAYER_EMBD, N_STREAMS, ACTIVE, N_LAYERS = 96, 32, 160, 64, 3, 1, 2
every_batch = pytest.mark.parametrize("n_tokens", [1, 5, 97])
# The tanh of the router is NumPy's in the oracle and the C++ library's in the kernels: they differ by some units in the
# last place, and later steps add rounding errors.
CLOSE = 1e-5


def _f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _norm(width: int, seed: int) -> Norm:
    return Norm(_f32(width, seed=seed), None, NormKind.RMS, 1e-3)


class LayerStack:
    """Plain layers of attention and a dense feed-forward, their KV cache, and parts that can be added."""

    def __init__(self, isa: str, ggml_type: GgmlType = GgmlType.F32) -> None:
        self.kernels, self._type = CpuKernels(isa, 2, 0), ggml_type
        self.layers = [self._layer(10 * i) for i in range(N_LAYERS)]
        codec = codec_of(KvType.F32, HEAD_DIM)
        layout = PageLayout(range(N_LAYERS), 1, HEAD_DIM, codec, codec)
        self.cache = PagedKvCache([layout], PagedKvCache.n_pages_for(200, 1), 1, self.kernels.new_pages)

    def _layer(self, seed: int) -> FlatLayer:
        return FlatLayer(
            attn_norm=_norm(WIDTH, seed),
            q=self.linear(3 * HEAD_DIM, WIDTH, seed + 1),
            k=self.linear(HEAD_DIM, WIDTH, seed + 2),
            v=self.linear(HEAD_DIM, WIDTH, seed + 3),
            head_dim=HEAD_DIM,
            scale=0.2,
            output=self.linear(WIDTH, 3 * HEAD_DIM, seed + 4),
            attn_post_norm=_norm(WIDTH, seed + 5),
            residual_scale=0.5,
            ffn_norm=_norm(WIDTH, seed + 6),
            gate=self.linear(N_FF, WIDTH, seed + 7),
            up=self.linear(N_FF, WIDTH, seed + 8),
            activation=Activation.GELU_TANH,
            down=self.linear(WIDTH, N_FF, seed + 9),
            ffn_post_norm=_norm(WIDTH, seed + 10),
        )

    def linear(self, n_out: int, n_in: int, seed: int, ggml_type: GgmlType | None = None) -> Linear:
        matrix = random_matrix(ggml_type or self._type, n_out, n_in, seed)
        weight = self.kernels.prepare(QuantizedTensor(f"w{seed}", matrix.shape, matrix.ggml_type, matrix.data))
        return Linear(weight, np.array([2.0**-4], np.float32))

    def embedding(self, seed: int) -> LayerEmbedding:
        return LayerEmbedding(
            self.linear(N_LAYER_EMBD, WIDTH, seed), self.linear(WIDTH, N_LAYER_EMBD, seed + 1), _norm(WIDTH, seed + 2)
        )

    def altup(self, seed: int) -> AltUp:
        few = GgmlType.F32
        return AltUp(
            router=self.linear(N_STREAMS, WIDTH, seed, few),
            router_norm=_norm(WIDTH, seed + 1),
            predict=self.linear(N_STREAMS**2, N_STREAMS, seed + 2, few),
            correct=self.linear(N_STREAMS, N_STREAMS, seed + 3, few),
            scale=_f32(WIDTH, seed=seed + 4),
        )

    def plan(self, n_tokens: int) -> BatchPlan:
        return self.kernels.place(self.cache.plan(np.zeros(n_tokens, np.int32), np.arange(n_tokens, dtype=np.int32)))

    def run(
        self,
        layers: Sequence[FlatLayer],
        streams: Sequence[Rows],
        plan: BatchPlan,
        layer_embeddings: Sequence[Rows | None],
        output_mask: NDArray[np.bool_] | None = None,
        first: int = 0,
    ) -> list[Rows]:
        fused = fuse_layers(self.kernels, layers)
        assert fused is not None
        kv_layers = self.cache.layers[first : first + len(layers)]
        return fused.run(streams, [None] * len(kv_layers), plan, kv_layers, layer_embeddings, output_mask)

    def run_plain(self, i: int, x: Rows, plan: BatchPlan) -> Rows:
        """The output of plain layer ``i`` for ``x``."""
        (output,) = self.run([self.layers[i]], [x], plan, [None], first=i)
        return output


def _assert_close(actual: Rows, expected: Rows) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=CLOSE * np.abs(expected).max(initial=0))


@every_isa
@every_batch
def test_streams(isa: str, n_tokens: int) -> None:
    """Each layer predicts all streams, computes the active one, and corrects all streams by its output."""
    stack, n = LayerStack(isa), n_tokens
    kernels, plan, layer_embeddings = (
        stack.kernels,
        stack.plan(n),
        [_f32(n, N_LAYER_EMBD, seed=50 + i) for i in range(N_LAYERS)],
    )
    streams = [_f32(n, WIDTH, seed=60 + i) for i in range(N_STREAMS)]
    layers, expected = [], streams
    for i, layer in enumerate(stack.layers):
        altup, embedding = stack.altup(70 + 10 * i), stack.embedding(75 + 10 * i)
        layers.append(replace(layer, altup=altup, active_stream=ACTIVE, embedding=embedding))
        (step,) = layers[-1].steps(kernels)
        assert isinstance(step, AltUpStep)
        predicted = step.predict(expected)
        output = stack.run_plain(i, predicted[ACTIVE], plan)
        expected = step.correct(predicted, output, layer_embeddings[i])
    before = [stream.copy() for stream in streams]
    output_mask = np.arange(n) % 3 == 1
    for actual, stream in zip(stack.run(layers, streams, plan, layer_embeddings), expected, strict=True):
        _assert_close(actual, stream)
    for actual, stream in zip(stack.run(layers, streams, plan, layer_embeddings, output_mask), expected, strict=True):
        _assert_close(actual, stream[output_mask])
    for stream, copy in zip(streams, before, strict=True):
        np.testing.assert_array_equal(stream, copy, "the input was overwritten")


@every_isa
@every_batch
@pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.Q8_0], ids=lambda t: t.name)
def test_embeddings_and_scales(isa: str, n_tokens: int, ggml_type: GgmlType) -> None:
    """With one residual stream; not every layer has an embedding."""
    stack, n = LayerStack(isa, ggml_type), n_tokens
    x, layer_embeddings, plan = _f32(n, WIDTH, seed=1), _f32(n, N_LAYER_EMBD, seed=2), stack.plan(n)
    embedding, scale = stack.embedding(30), np.array([0.75], np.float32)
    first, second = stack.layers
    layers = [replace(first, embedding=embedding, output_scale=scale), replace(second, output_scale=scale * 3)]
    after = stack.run_plain(0, x, plan)
    after = (after + let_in(stack.kernels, embedding, after, layer_embeddings, first.activation)) * scale
    expected = stack.run_plain(1, after, plan) * (scale * 3)
    (actual,) = stack.run(layers, [x], plan, [layer_embeddings, None])
    np.testing.assert_array_equal(actual, expected)
    output_mask = np.arange(n) % 2 == 0
    last = [replace(first, embedding=embedding)]
    (whole,), (part,) = (
        stack.run(last, [x], plan, [layer_embeddings]),
        stack.run(last, [x], plan, [layer_embeddings], output_mask),
    )
    if ggml_type is GgmlType.F32:
        _assert_close(part, whole[output_mask])


@every_isa
@every_batch
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.Q8_0], ids=lambda t: t.name)
def test_experts(isa: str, n_tokens: int, parallel: bool, ggml_type: GgmlType) -> None:
    stack, n = LayerStack(isa, ggml_type), n_tokens
    x, plan, kernels = _f32(n, WIDTH, seed=1), stack.plan(n), stack.kernels
    moe = kernels.moe(_experts(stack))
    layer = replace(stack.layers[0].attention_only(), parallel=parallel)
    post_norm, ffn_norm = _norm(WIDTH, 3), _norm(WIDTH, 4)
    after = stack.run([layer], [x], plan, [None])[0]
    moe_output = kernels.normed(moe.run(x if parallel else after, ffn_norm), post_norm)
    expected = after + moe_output * np.float32(layer.residual_scale)
    whole = replace(layer, moe=moe, ffn_norm=ffn_norm, ffn_post_norm=post_norm)
    (actual,) = stack.run([whole], [x], plan, [None])
    np.testing.assert_array_equal(actual, expected)
    second = stack.layers[1]
    (both,) = stack.run([whole, second], [x], plan, [None, None])
    np.testing.assert_array_equal(both, stack.run_plain(1, actual, plan))


def _experts(stack: LayerStack) -> Experts:
    def feed_forward(seed: int) -> FeedForward:
        up, down = stack.linear(N_FF, WIDTH, seed + 1), stack.linear(WIDTH, N_FF, seed + 2)
        return FeedForward(stack.linear(N_FF, WIDTH, seed), up, down)

    spec = ExpertsSpec(5, 2, Gating.SOFTMAX, normalized=True)
    router = stack.linear(5, WIDTH, 90, GgmlType.F32)
    return Experts(
        spec, router, None, [feed_forward(100 + 3 * i) for i in range(5)], Activation.SILU, shared=feed_forward(130)
    )


@every_isa
def test_each_part_changes_the_output(isa: str) -> None:
    stack = LayerStack(isa)
    plan, layer_embeddings = stack.plan(7), _f32(7, N_LAYER_EMBD, seed=2)
    streams = [_f32(7, WIDTH, seed=60 + i) for i in range(N_STREAMS)]
    altup, embedding = stack.altup(70), stack.embedding(80)
    layer = replace(stack.layers[0], altup=altup, active_stream=ACTIVE, embedding=embedding)

    def output(changed: FlatLayer) -> Rows:
        return np.stack(stack.run([changed], streams, plan, [layer_embeddings]))

    whole, other = output(layer), stack.altup(85)
    for name in ("router", "router_norm", "predict", "correct", "scale"):
        changed = replace(layer, altup=replace(altup, **{name: getattr(other, name)}))
        assert not np.array_equal(output(changed), whole), name
    assert not np.array_equal(output(replace(layer, active_stream=2)), whole)
    another = stack.embedding(95)
    for name in ("gate", "project", "norm"):
        changed = replace(layer, embedding=replace(embedding, **{name: getattr(another, name)}))
        actual = output(changed)
        np.testing.assert_array_equal(actual[0], whole[0], "the embedding must not change the first stream")
        assert not np.array_equal(actual[1:], whole[1:]), name


def test_mismatched_parts_are_refused() -> None:
    stack = LayerStack("scalar")
    plan, layer_embeddings, x = stack.plan(2), _f32(2, N_LAYER_EMBD, seed=1), _f32(2, WIDTH, seed=2)
    layer, altup, embedding = stack.layers[0], stack.altup(70), stack.embedding(80)
    whole = replace(layer, altup=altup, embedding=embedding)

    def assert_refused(match: str, changed: FlatLayer, streams: Sequence[Any], embedding_rows: Any) -> None:
        with pytest.raises(ValueError, match=match):
            stack.run([changed], streams, plan, [embedding_rows])

    assert_refused("differ in their number of streams", whole, [x, x], layer_embeddings)
    assert_refused("streams differ in shape", whole, [x, x, x[:1]], layer_embeddings)
    assert_refused("need an embedding", whole, [x] * 3, None)
    assert_refused(r"embeddings are \[2, 32\]", whole, [x] * 3, layer_embeddings[:, :32].copy())
    assert_refused("the active stream is out of range", replace(whole, active_stream=3), [x] * 3, layer_embeddings)
    assert_refused("streams need embeddings", replace(whole, embedding=None), [x] * 3, None)
    assert_refused(
        "streams need embeddings, and take no scale",
        replace(whole, output_scale=_f32(1, seed=1)),
        [x] * 3,
        layer_embeddings,
    )
    other = replace(altup, predict=stack.linear(8, 3, 1))
    assert_refused(r"predict is \[8, 3\], not \[9, 3\]", replace(whole, altup=other), [x] * 3, layer_embeddings)
    other = replace(embedding, project=stack.linear(WIDTH, 96, 1))
    assert_refused(
        r"the embedding's project is \[96, 96\], not \[96, 64\]",
        replace(whole, embedding=other),
        [x] * 3,
        layer_embeddings,
    )


def test_arguments_that_no_step_passes_are_refused() -> None:
    """C++ checks its arguments even if no step can pass wrong ones."""
    stack = LayerStack("scalar")
    layer, plan, x = stack.layers[0], stack.plan(2), _f32(2, WIDTH, seed=2)
    fused = fuse_layers(stack.kernels, [layer])
    assert fused is not None
    with pytest.raises(ValueError, match="streams differ in shape"):
        fused.run_unchecked([x[:, :64].copy(), x], plan, stack.cache.layers[0], [None])
    with pytest.raises(ValueError, match="exactly the layers with n_embedding"):
        fused.run_unchecked([x], plan, stack.cache.layers[0], [_f32(2, N_LAYER_EMBD, seed=1)])
    with pytest.raises(ValueError, match="experts of another width, or with a feed-forward layer"):
        native_layer_unchecked(replace(layer, moe=stack.kernels.moe(_experts(stack))))


def test_experts_without_kernels_are_not_fused() -> None:
    """The attention before them is fused."""
    stack = LayerStack("scalar")
    experts = _experts(stack)
    iq2_xs = random_matrix(GgmlType.IQ2_XS, N_FF, 256, 1)
    down = Linear(stack.kernels.prepare(QuantizedTensor("iq", iq2_xs.shape, iq2_xs.ggml_type, iq2_xs.data)))
    moe = stack.kernels.moe(replace(experts, shared=FeedForward(None, down, down)))
    layer = replace(stack.layers[0].attention_only(), moe=moe)
    assert fuse_layers(stack.kernels, [layer]) is None
    assert fuse_layers(stack.kernels, [layer.attention_only()]) is not None
