"""Layers that the cpu tier fuses into one call, bit for bit against the unfused steps. The steps have other tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from native.flat_layers import FlatLayer, FusedLayers, fuse_layers
from random_matrices import random_matrix
from slm_core.architectures import Activation, NormKind, RopeStyle
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType
from slm_native import _extension
from slm_native.kernels import Laurel, Linear, Norm, Rotation, Scoring
from slm_native.kernels.cpu import CpuKernels
from slm_native.kv import BatchPlan, KvLayer, PagedKvCache, PageLayout, codec_of

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

Rows = NDArray[np.float32]
every_batch = pytest.mark.parametrize("seq_ids", [[0], [2, 0, 1, 0, 2, 2], [0] * 90 + [1] * 7], ids=["1", "6", "97"])
N_HEADS, N_KV_HEADS, HEAD_DIM, WIDTH, N_FF, N_LAYERS = 16, 2, 32, 256, 768, 7


class LayerStack:
    """Layers of seven kinds and their KV cache.

    Factors are powers of two, so that a fused multiply-add rounds to the same number as a product and a sum.
    """

    def __init__(self, isa: str, types: Sequence[GgmlType]) -> None:
        self.kernels = CpuKernels(isa, 2, 0)
        self._types = types
        q, kv = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM
        plain = FlatLayer(
            attn_norm=_norm(WIDTH, 1),
            q=self._linear(q, WIDTH, 10),
            k=self._linear(kv, WIDTH, 11),
            v=self._linear(kv, WIDTH, 12),
            q_norm=_norm(HEAD_DIM, 2),
            k_norm=_norm(HEAD_DIM, 3),
            head_dim=HEAD_DIM,
            scale=0.2,
            scoring=Scoring(),
            output=self._linear(WIDTH, q, 13),
            ffn_norm=_norm(WIDTH, 4),
            gate=self._linear(N_FF, WIDTH, 14),
            up=self._linear(N_FF, WIDTH, 15),
            activation=Activation.SILU,
            down=self._linear(WIDTH, N_FF, 16),
            v_norm=None,
            qkv_limit=None,
            attn_post_norm=None,
            residual_scale=1.0,
            parallel=False,
        )
        biased = {name: replace(getattr(plain, name), bias=_f32(n, seed=n)) for name, n in (("q", q), ("k", kv))}
        biased |= {
            "v": replace(plain.v, bias=_f32(kv, seed=8)),
            "output": replace(plain.output, bias=_f32(WIDTH, seed=9)),
        }
        scoring = Scoring(window=20, softcap=3.0, slopes=abs(_f32(N_HEADS, seed=5)), sinks=_f32(N_HEADS, seed=6))
        self.layers = [
            plain,
            replace(plain, **biased, down=replace(plain.down, bias=_f32(WIDTH, seed=7)), q_norm=None, k_norm=None),
            # Without norms its output is large: a small residual scale keeps the later layers above its rounding.
            replace(plain, scoring=scoring, attn_norm=None, ffn_norm=None, scale=0.7, residual_scale=2.0**-12),
            replace(
                plain,
                attn_norm=_layer_norm(WIDTH, 20),
                q_norm=_norm((N_HEADS, HEAD_DIM), 21),
                k_norm=_norm(kv, 22),
                attn_post_norm=_layer_norm(WIDTH, 23),
                ffn_norm=_norm(WIDTH, 24, eps=0.5),
                gate=None,
                up=replace(plain.up, bias=_f32(N_FF, seed=25), scale=np.array([0.25], np.float32)),
                activation=Activation.GELU,
                down=replace(plain.down, bias=_f32(WIDTH, seed=26)),
                ffn_post_norm=_norm(WIDTH, 27),
                residual_scale=0.5,
            ),
            replace(
                plain,
                v=None,
                v_norm=_norm(HEAD_DIM, 30),
                qkv_limit=0.75,
                gate=replace(plain.gate, bias=_f32(N_FF, seed=31)),
                activation=Activation.GELU_TANH,
                parallel=True,
            ),
            replace(
                plain,
                laurel=Laurel(self._linear(256, WIDTH, 40), self._linear(WIDTH, 256, 41), _norm(WIDTH, 42)),
                gate_threshold=0.4,
            ),
            replace(plain, k=None, v=None, k_norm=None, ffn_norm=None, gate=None, up=None, down=None),
        ]
        layout = PageLayout(
            range(N_LAYERS), N_KV_HEADS, HEAD_DIM, codec_of(KvType.F16, HEAD_DIM), codec_of(KvType.Q8_0, HEAD_DIM)
        )
        self.cache = PagedKvCache([layout], PagedKvCache.n_pages_for(600, 3), 3, self.kernels.new_pages)

    def _linear(self, n_out: int, n_in: int, seed: int) -> Linear:
        matrix = random_matrix(self._types[seed % len(self._types)], n_out, n_in, seed)
        weight = self.kernels.prepare(QuantizedTensor(f"w{seed}", matrix.shape, matrix.ggml_type, matrix.data))
        return Linear(weight, None if seed in {11, 12} else np.array([2.0**-4], np.float32))  # keeps sums finite

    @property
    def caches(self) -> list[KvLayer]:
        """The KV cache of each layer; the last layer shares that of the first."""
        return [*self.cache.layers[:-1], self.cache.layers[0]]

    def fused(self) -> FusedLayers:
        fused = fuse_layers(self.kernels, self.layers)
        assert fused is not None
        return fused

    def run(
        self,
        x: Rows,
        rotations: Sequence[Rotation | None],
        plan: BatchPlan,
        caches: Sequence[KvLayer],
        output_mask: NDArray[np.bool_] | None = None,
    ) -> Rows:
        (y,) = self.fused().run([x], rotations, plan, caches, [None] * len(self.layers), output_mask)
        return y

    def plan(self, seq_ids: Sequence[int], start: int) -> BatchPlan:
        ids = np.array(seq_ids, np.int32)
        positions = np.array([start + seq_ids[:i].count(seq_id) for i, seq_id in enumerate(seq_ids)], np.int32)
        return self.kernels.place(self.cache.plan(ids, positions))

    def run_unfused(
        self, x: Rows, rotations: Sequence[Rotation | None], plan: BatchPlan, caches: Sequence[KvLayer]
    ) -> Rows:
        kernels = self.kernels
        for layer, rotation, cache in zip(self.layers, rotations, caches, strict=True):
            linears = [linear for linear in (layer.q, layer.k, layer.v) if linear is not None]
            flat = kernels.project(x, layer.attn_norm, linears)
            q, *kv = flat if layer.qkv_limit is None else [kernels.clip(each, layer.qkv_limit) for each in flat]
            if kv:
                v = kernels.heads(kv[-1], HEAD_DIM, layer.v_norm).reshape(len(x), -1)
                kernels.store(cache, plan, kv[0], v, HEAD_DIM, layer.k_norm, rotation)
            q = kernels.heads(q, HEAD_DIM, layer.q_norm, rotation)
            attention = kernels.attention_over_runs(q, cache, plan, layer.scale, layer.scoring).reshape(len(x), -1)
            attention_output = self._add_product(x, attention, layer.output, layer.attn_post_norm, layer.residual_scale)
            if layer.laurel is not None:
                normed = kernels.normed(x, layer.attn_norm)
                low = kernels.linear(normed, layer.laurel.left)
                laurel_output = self._add_product(
                    normed + attention_output, low, layer.laurel.right, layer.laurel.norm, 1.0
                )
                attention_output = laurel_output * np.float32(2**-0.5)
            if layer.up is None or layer.down is None:
                x = attention_output
                continue
            ffn_input = x if layer.parallel else attention_output
            inner = kernels.gate_up(
                ffn_input, layer.ffn_norm, layer.gate, layer.up, layer.activation, layer.gate_threshold
            )
            x = self._add_product(attention_output, inner, layer.down, layer.ffn_post_norm, layer.residual_scale)
        return x

    def _add_product(self, residual: Rows, x: Rows, linear: Linear, norm: Norm | None, scale: float) -> Rows:
        output: Rows = self.kernels.normed(self.kernels.linear(x, linear), norm)
        return residual + output * np.float32(scale)


def _f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _norm(shape: int | tuple[int, ...], seed: int, eps: float = 1e-3) -> Norm:
    return Norm(_f32(*np.atleast_1d(shape), seed=seed), None, NormKind.RMS, eps)


def _layer_norm(width: int, seed: int) -> Norm:
    return Norm(_f32(width, seed=seed), _f32(width, seed=seed + 100), NormKind.LAYER, 1e-2)


def _rotations(n_tokens: int) -> list[Rotation | None]:
    split, pairs = _rotation(n_tokens, 16, RopeStyle.HALF_SPLIT, 1), _rotation(n_tokens, 8, RopeStyle.INTERLEAVED, 2)
    return [split, None, pairs, split, pairs, None, split]


def _rotation(n_tokens: int, half: int, style: RopeStyle, seed: int) -> Rotation:
    angles = np.random.default_rng(seed).uniform(-9, 9, (n_tokens, half)).astype(np.float32)
    return Rotation(np.cos(angles), np.sin(angles), style)


@every_isa
@every_batch
@pytest.mark.parametrize("types", [(GgmlType.F32, GgmlType.F16), (GgmlType.Q4_0, GgmlType.Q6_K, GgmlType.Q8_0)])
def test_fused_layers_equal_their_steps(isa: str, seq_ids: list[int], types: tuple[GgmlType, ...]) -> None:
    stack = LayerStack(isa, types)
    n = len(seq_ids)
    rotations = _rotations(n)
    for batch in range(2):  # the second batch reads the keys and values of the first
        x, plan = _f32(n, WIDTH, seed=batch), stack.plan(seq_ids, 0 if batch == 0 else seq_ids.count(seq_ids[0]))
        if batch and len(set(seq_ids)) > 1:
            return  # sequences of different lengths: one batch is enough
        before = x.copy()
        caches = stack.caches
        expected = stack.run_unfused(x, rotations, plan, caches)
        stored = [layer.keys(slice(0, 9), 9 * 64).copy() for layer in stack.cache.layers]
        actual = stack.run(x, rotations, plan, caches)
        np.testing.assert_array_equal(actual, expected)
        output_mask = np.arange(n) % 3 != 1  # most rows: kernels for few rows sum in another order
        np.testing.assert_array_equal(stack.run(x, rotations, plan, caches, output_mask), expected[output_mask])
        np.testing.assert_array_equal(x, before, "the input was overwritten")
        for layer, keys in zip(stack.cache.layers, stored, strict=True):
            np.testing.assert_array_equal(layer.keys(slice(0, 9), 9 * 64), keys)
        stack.cache.commit(plan)


@every_isa
def test_each_part_of_a_layer_changes_the_output(isa: str) -> None:
    """Without any one part of any layer, the output of the last layer differs: the fused call skips no part."""
    stack = LayerStack(isa, (GgmlType.F32,))
    n = 24  # more than the window of the third layer
    x, plan = _f32(n, WIDTH, seed=1), stack.plan([0] * n, 0)
    rotations = _rotations(n)
    whole = stack.run(x, rotations, plan, stack.caches)
    original = stack.layers
    first, second, third, fourth, fifth, sixth, last = original
    scores = ("window", "softcap", "slopes", "sinks")
    unbiased = {name: replace(getattr(second, name), bias=None) for name in ("q", "k", "v", "output", "down")}
    norms = ("attn_norm", "q_norm", "k_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm")
    layer_norm = fourth.attn_norm
    assert layer_norm is not None
    assert fourth.up is not None
    assert fifth.gate is not None
    laurel = sixth.laurel
    assert laurel is not None
    parts: list[tuple[int, FlatLayer]] = [
        *((0, replace(first, **{name: None})) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm")),
        *((1, replace(second, **{name: linear})) for name, linear in unbiased.items()),
        *((2, replace(third, scoring=replace(third.scoring, **{name: None}))) for name in scores),
        (2, replace(third, scale=0.1)),
        (0, replace(first, gate=first.up)),
        *((3, replace(fourth, **{name: None})) for name in norms),
        (3, replace(fourth, attn_norm=replace(layer_norm, bias=None))),
        (3, replace(fourth, attn_norm=replace(layer_norm, kind=NormKind.RMS))),
        (0, replace(first, attn_norm=_norm(WIDTH, 1, eps=0.5))),
        (3, replace(fourth, gate=first.gate)),
        (3, replace(fourth, up=replace(fourth.up, bias=None))),
        (3, replace(fourth, up=replace(fourth.up, scale=None))),
        (3, replace(fourth, activation=Activation.RELU)),
        (3, replace(fourth, residual_scale=1.0)),
        (4, replace(fifth, v=first.v)),
        (4, replace(fifth, v_norm=None)),
        (4, replace(fifth, qkv_limit=None)),
        (4, replace(fifth, gate=replace(fifth.gate, bias=None))),
        (4, replace(fifth, parallel=False)),
        (5, replace(sixth, laurel=None)),
        (5, replace(sixth, laurel=replace(laurel, right=replace(laurel.right, scale=None), norm=_norm(WIDTH, 43)))),
        (5, replace(sixth, gate_threshold=None)),
        (5, replace(sixth, gate_threshold=0.5)),
        (6, replace(last, k=first.k, v=first.v)),
        (6, replace(last, up=first.up, down=first.down)),
    ]
    for number, (i, layer) in enumerate(parts):
        stack.layers = [layer if i == k else other for k, other in enumerate(original)]
        assert not np.array_equal(stack.run(x, rotations, plan, stack.caches), whole), number


@every_isa
def test_layers_without_kernels_are_not_fused(isa: str) -> None:
    stack = LayerStack(isa, (GgmlType.F32,))
    first, *others = stack.layers
    iq = random_matrix(GgmlType.IQ2_XS, N_FF, WIDTH, 1)
    no_kernel = Linear(stack.kernels.prepare(QuantizedTensor("iq", iq.shape, iq.ggml_type, iq.data)))
    assert fuse_layers(stack.kernels, [replace(first, up=no_kernel), *others]) is None


@every_isa
def test_mismatched_arguments_are_refused(isa: str) -> None:
    native_module = _extension.load()
    stack = LayerStack(isa, (GgmlType.F32,))
    x, plan, angles = _f32(2, WIDTH, seed=1), stack.plan([0, 0], 0), _rotation(2, 16, RopeStyle.HALF_SPLIT, 1)
    caches = stack.caches
    with pytest.raises(ValueError, match="x has rows of 255, the layer takes 256"):
        stack.run(x[:, :255], [angles] * 7, plan, caches)
    with pytest.raises(ValueError, match="a token is out of range"):
        stack.run(_f32(3, WIDTH, seed=1), [None] * 7, plan, caches)
    with pytest.raises(ValueError, match="cos and sin must be"):
        stack.run(x, [_rotation(2, 17, RopeStyle.HALF_SPLIT, 1)] * 7, plan, caches)
    fused, batch = stack.fused().step, (plan.pages, plan.slots, plan.native)
    native_layers, native_caches = [each.native for each in fused.layers], [cache.native for cache in caches]
    native_angles = [native_module.Angles.of(angles.cos, angles.sin, False)] * 7
    with pytest.raises(ValueError, match="differ in number"):
        fused.kernels.run_layers([x], native_layers, native_caches[:2], native_angles, [None] * 7, *batch, None)
    layout = PageLayout(range(7), N_KV_HEADS, 16, codec_of(KvType.F32, 16), codec_of(KvType.F32, 16))
    other = PagedKvCache([layout], PagedKvCache.n_pages_for(600, 3), 3, stack.kernels.new_pages)
    with pytest.raises(ValueError, match="the heads of the cache and of the layer differ"):
        stack.run(x, [angles] * 7, plan, other.layers)
    with pytest.raises(ValueError, match="cos and sin differ in shape"):
        native_module.Angles.of(_f32(2, 4, seed=1), _f32(2, 5, seed=1), False)
    with pytest.raises(ValueError, match="output_tokens must be ascending"):
        stack.run(x, [angles] * 7, plan, caches, np.array([False, False, True]))
    with pytest.raises(ValueError, match="attn_norm must have the width 256"):
        fuse_layers(stack.kernels, [replace(stack.layers[0], attn_norm=_norm(255, 1))])
    with pytest.raises(ValueError, match="q_norm must have the width of one head"):
        fuse_layers(stack.kernels, [replace(stack.layers[0], q_norm=_norm(31, 1))])
    with pytest.raises(ValueError, match="a threshold without a gate"):
        fuse_layers(stack.kernels, [replace(stack.layers[0], gate=None, gate_threshold=0.5)])
    mismatched = Laurel(stack._linear(24, WIDTH, 1), stack._linear(WIDTH, 25, 1), _norm(WIDTH, 1))
    with pytest.raises(ValueError, match=r"right is \[256, 25\], not \[256, 24\]"):
        fuse_layers(stack.kernels, [replace(stack.layers[0], laurel=mismatched)])
    with pytest.raises(ValueError, match="a feed-forward layer needs up and down"):
        fuse_layers(stack.kernels, [replace(stack.layers[0], down=None)])
    other_stack = LayerStack(isa, (GgmlType.F32,))
    with pytest.raises(ValueError, match=r"output is \[768, 512\], not \[256, 512\]"):
        fuse_layers(other_stack.kernels, [replace(stack.layers[0], output=other_stack._linear(768, 512, 1))])
