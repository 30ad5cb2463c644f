"""What lies around fused blocks, and experts in them: several streams, embeddings of a block's own, a scale.

Against the steps that they are made of, on the same tier; attention and dense layers have their own tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from native.flat_layers import FlatLayer, native_layer_as_told, one_call
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
WIDTH, HEAD_DIM, N_FF, N_OWN, N_STREAMS, ACTIVE, N_BLOCKS = 96, 32, 160, 64, 3, 1, 2
every_isa = pytest.mark.parametrize("isa", _extension.load().available_isas())
every_batch = pytest.mark.parametrize("n_tokens", [1, 5, 97])
# The hyperbolic tangent is NumPy's in one and the C++ library's in the other: some units of the last place, in shares
# of N streams, and rounding errors of what follows.
CLOSE = 1e-5


def _f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _norm(width: int, seed: int) -> Norm:
    return Norm(_f32(width, seed=seed), None, NormKind.RMS, 1e-3)


class Around:
    """Plain blocks of attention and a dense layer, a cache, and what can be put around them."""

    def __init__(self, isa: str, ggml_type: GgmlType = GgmlType.F32) -> None:
        self.kernels, self._type = CpuKernels(isa, 2, 0), ggml_type
        self.blocks = [self._block(10 * i) for i in range(N_BLOCKS)]
        codec = codec_of(KvType.F32, HEAD_DIM)
        layout = PageLayout(range(N_BLOCKS), 1, HEAD_DIM, codec, codec)
        self.cache = PagedKvCache([layout], PagedKvCache.n_pages_for(200, 1), 1, self.kernels.new_pages)

    def _block(self, seed: int) -> FlatLayer:
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
            self.linear(N_OWN, WIDTH, seed), self.linear(WIDTH, N_OWN, seed + 1), _norm(WIDTH, seed + 2)
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
        blocks: Sequence[FlatLayer],
        streams: Sequence[Rows],
        plan: BatchPlan,
        own: Sequence[Rows | None],
        wanted: NDArray[np.bool_] | None = None,
        first: int = 0,
    ) -> list[Rows]:
        fused = one_call(self.kernels, blocks)
        assert fused is not None
        layers = self.cache.layers[first : first + len(blocks)]
        return fused.run(streams, [None] * len(blocks), plan, layers, own, wanted)

    def alone(self, i: int, x: Rows, plan: BatchPlan) -> Rows:
        """What block ``i`` makes of ``x`` without anything around it."""
        (made,) = self.run([self.blocks[i]], [x], plan, [None], first=i)
        return made


def _assert_close(found: Rows, wanted: Rows) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=CLOSE * np.abs(wanted).max(initial=0))


@every_isa
@every_batch
def test_streams(isa: str, n_tokens: int) -> None:
    """Predicted before each block, and corrected behind it by what it made of one of them."""
    around, n = Around(isa), n_tokens
    kernels, plan, own = around.kernels, around.plan(n), [_f32(n, N_OWN, seed=50 + i) for i in range(N_BLOCKS)]
    streams = [_f32(n, WIDTH, seed=60 + i) for i in range(N_STREAMS)]
    blocks, wanted = [], streams
    for i, block in enumerate(around.blocks):
        altup, embedding = around.altup(70 + 10 * i), around.embedding(75 + 10 * i)
        blocks.append(replace(block, altup=altup, active_stream=ACTIVE, embedding=embedding))
        (step,) = blocks[-1].steps(kernels)
        assert isinstance(step, AltUpStep)
        guessed = step.predict(wanted)
        made = around.alone(i, guessed[ACTIVE], plan)
        wanted = step.correct(guessed, made, own[i])
    before = [stream.copy() for stream in streams]
    some = np.arange(n) % 3 == 1
    for found, stream in zip(around.run(blocks, streams, plan, own), wanted, strict=True):
        _assert_close(found, stream)
    for found, stream in zip(around.run(blocks, streams, plan, own, some), wanted, strict=True):
        _assert_close(found, stream[some])
    for stream, copy in zip(streams, before, strict=True):
        np.testing.assert_array_equal(stream, copy, "what came in was written")


@every_isa
@every_batch
@pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.Q8_0], ids=lambda t: t.name)
def test_embeddings_and_scales(isa: str, n_tokens: int, ggml_type: GgmlType) -> None:
    """Of one stream: some blocks have them."""
    around, n = Around(isa, ggml_type), n_tokens
    x, own, plan = _f32(n, WIDTH, seed=1), _f32(n, N_OWN, seed=2), around.plan(n)
    embedding, scale = around.embedding(30), np.array([0.75], np.float32)
    first, second = around.blocks
    blocks = [replace(first, embedding=embedding, output_scale=scale), replace(second, output_scale=scale * 3)]
    after = around.alone(0, x, plan)
    after = (after + let_in(around.kernels, embedding, after, own, first.activation)) * scale
    wanted = around.alone(1, after, plan) * (scale * 3)
    (found,) = around.run(blocks, [x], plan, [own, None])
    np.testing.assert_array_equal(found, wanted)
    some = np.arange(n) % 2 == 0
    last = [replace(first, embedding=embedding)]
    (whole,), (part,) = around.run(last, [x], plan, [own]), around.run(last, [x], plan, [own], some)
    if ggml_type is GgmlType.F32:
        _assert_close(part, whole[some])


@every_isa
@every_batch
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.Q8_0], ids=lambda t: t.name)
def test_experts(isa: str, n_tokens: int, parallel: bool, ggml_type: GgmlType) -> None:
    around, n = Around(isa, ggml_type), n_tokens
    x, plan, kernels = _f32(n, WIDTH, seed=1), around.plan(n), around.kernels
    mixture = kernels.moe(_experts(around))
    block = replace(around.blocks[0].attention_alone(), parallel=parallel)
    post_norm, ffn_norm = _norm(WIDTH, 3), _norm(WIDTH, 4)
    after = around.run([block], [x], plan, [None])[0]
    made = kernels.normed(mixture.run(x if parallel else after, ffn_norm), post_norm)
    wanted = after + made * np.float32(block.residual_scale)
    whole = replace(block, moe=mixture, ffn_norm=ffn_norm, ffn_post_norm=post_norm)
    (found,) = around.run([whole], [x], plan, [None])
    np.testing.assert_array_equal(found, wanted)
    second = around.blocks[1]
    (both,) = around.run([whole, second], [x], plan, [None, None])
    np.testing.assert_array_equal(both, around.alone(1, found, plan))


def _experts(around: Around) -> Experts:
    def fed(seed: int) -> FeedForward:
        up, down = around.linear(N_FF, WIDTH, seed + 1), around.linear(WIDTH, N_FF, seed + 2)
        return FeedForward(around.linear(N_FF, WIDTH, seed), up, down)

    spec = ExpertsSpec(5, 2, Gating.SOFTMAX, normalized=True)
    router = around.linear(5, WIDTH, 90, GgmlType.F32)
    return Experts(spec, router, None, [fed(100 + 3 * i) for i in range(5)], Activation.SILU, shared=fed(130))


@every_isa
def test_each_part_of_it_matters(isa: str) -> None:
    around = Around(isa)
    plan, own = around.plan(7), _f32(7, N_OWN, seed=2)
    streams = [_f32(7, WIDTH, seed=60 + i) for i in range(N_STREAMS)]
    altup, embedding = around.altup(70), around.embedding(80)
    block = replace(around.blocks[0], altup=altup, active_stream=ACTIVE, embedding=embedding)

    def made(changed: FlatLayer) -> Rows:
        return np.stack(around.run([changed], streams, plan, [own]))

    whole, other = made(block), around.altup(85)
    for name in ("router", "router_norm", "predict", "correct", "scale"):
        changed = replace(block, altup=replace(altup, **{name: getattr(other, name)}))
        assert not np.array_equal(made(changed), whole), name
    assert not np.array_equal(made(replace(block, active_stream=2)), whole)
    another = around.embedding(95)
    for name in ("gate", "project", "norm"):
        changed = replace(block, embedding=replace(embedding, **{name: getattr(another, name)}))
        found = made(changed)
        np.testing.assert_array_equal(found[0], whole[0], "the first stream does without")
        assert not np.array_equal(found[1:], whole[1:]), name


def test_what_does_not_fit_is_refused() -> None:
    around = Around("scalar")
    plan, own, x = around.plan(2), _f32(2, N_OWN, seed=1), _f32(2, WIDTH, seed=2)
    block, altup, embedding = around.blocks[0], around.altup(70), around.embedding(80)
    whole = replace(block, altup=altup, embedding=embedding)

    def refused(match: str, changed: FlatLayer, streams: Sequence[Any], given: Any) -> None:
        with pytest.raises(ValueError, match=match):
            around.run([changed], streams, plan, [given])

    refused("takes another number of streams", whole, [x, x], own)
    refused("streams that differ in shape", whole, [x, x, x[:1]], own)
    refused("none for one with", whole, [x] * 3, None)
    refused(r"embeddings are \[2, 32\]", whole, [x] * 3, own[:, :32].copy())
    refused("the active stream is none of them", replace(whole, active_stream=3), [x] * 3, own)
    refused("streams without embeddings", replace(whole, embedding=None), [x] * 3, None)
    refused("streams without embeddings, or scaled", replace(whole, output_scale=_f32(1, seed=1)), [x] * 3, own)
    other = replace(altup, predict=around.linear(8, 3, 1))
    refused(r"predict is \[8, 3\], not \[9, 3\]", replace(whole, altup=other), [x] * 3, own)
    other = replace(embedding, project=around.linear(WIDTH, 96, 1))
    refused(r"the embedding's project is \[96, 96\], not \[96, 64\]", replace(whole, embedding=other), [x] * 3, own)


def test_what_no_step_asks_for_is_refused() -> None:
    """C++ checks what it is given, whoever gives it."""
    around = Around("scalar")
    block, plan, x = around.blocks[0], around.plan(2), _f32(2, WIDTH, seed=2)
    call = one_call(around.kernels, [block])
    assert call is not None
    with pytest.raises(ValueError, match="streams that differ in shape"):
        call.run_as_told([x[:, :64].copy(), x], plan, around.cache.layers[0], [None])
    with pytest.raises(ValueError, match="an embedding for a layer without"):
        call.run_as_told([x], plan, around.cache.layers[0], [_f32(2, N_OWN, seed=1)])
    with pytest.raises(ValueError, match="experts beside a feed-forward layer"):
        native_layer_as_told(replace(block, moe=around.kernels.moe(_experts(around))))


def test_experts_of_steps_are_not_fused() -> None:
    """What precedes them is."""
    around = Around("scalar")
    experts = _experts(around)
    iq = random_matrix(GgmlType.IQ2_XS, N_FF, 256, 1)
    down = Linear(around.kernels.prepare(QuantizedTensor("iq", iq.shape, iq.ggml_type, iq.data)))
    mixture = around.kernels.moe(replace(experts, shared=FeedForward(None, down, down)))
    block = replace(around.blocks[0].attention_alone(), moe=mixture)
    assert one_call(around.kernels, [block]) is None
    assert one_call(around.kernels, [block.attention_alone()]) is not None
