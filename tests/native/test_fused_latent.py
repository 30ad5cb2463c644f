"""Layers with latent attention (MLA) that the cpu tier fuses, against their unfused steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from native.flat_layers import FlatLayer, FusedLayers, fuse_layers, native_layer_unchecked
from random_matrices import FLOATS, random_matrix
from slm_core.architectures import LatentSpec, NormKind, RopeStyle
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType
from slm_native import _extension
from slm_native.kernels import LatentAttention, Linear, Norm, Rotation
from slm_native.kernels.cpu import CpuKernels
from slm_native.kv import BatchPlan, PagedKvCache, PageLayout, codec_of
from slm_native.steps import MultiHeadLatentAttention

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

Rows = NDArray[np.float32]
WIDTH, N_HEADS, N_NOPE, N_ROTATED, N_RANK, N_RESULT, N_LOW, N_FF = 96, 3, 32, 16, 64, 96, 128, 160
HEAD_DIM = N_ROTATED + N_RANK
N_HELD = 11_000  # so long that the keys and values of all heads are not expanded at once
ATTENTION_ONLY = slice(2, 3)  # the layer without a feed-forward
SPEC = LatentSpec(n_nope=N_NOPE, n_rank=N_RANK, n_value=N_RESULT)
every_batch = pytest.mark.parametrize("seq_ids", [[0], [0] * 7, [1] * 130, [0, 2, 1], [2, 0, 2, 2, 0, 1]], ids=len)
every_type = pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.Q8_0], ids=lambda t: t.name)


def _f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _norm(width: int, seed: int) -> Norm:
    return Norm(_f32(width, seed=seed), None, NormKind.RMS, 1e-3)


class LatentStack:
    """Three layers and their KV cache: compressed queries; direct queries with fewer norms; no feed-forward."""

    def __init__(self, isa: str, ggml_type: GgmlType, n_result: int = N_RESULT, selected: slice = slice(None)) -> None:
        self.kernels, self._type = CpuKernels(isa, 2, 0), ggml_type
        n_q = N_HEADS * (N_NOPE + N_ROTATED)
        compressed = LatentAttention(
            q_down=self.linear(N_LOW, WIDTH, 1),
            q_norm=_norm(N_LOW, 2),
            q=self.linear(n_q, N_LOW, 3),
            kv_down=self.linear(HEAD_DIM, WIDTH, 4),
            kv_norm=_norm(N_RANK, 5),
            k_up=self.kernels.per_head([self.linear(N_RANK, N_NOPE, 10 + i, plain=True) for i in range(N_HEADS)]),
            v_up=self.kernels.per_head([self.linear(n_result, N_RANK, 20 + i, plain=True) for i in range(N_HEADS)]),
            output=self.linear(WIDTH, N_HEADS * n_result, 6),
        )
        direct = replace(compressed, q_down=None, q_norm=None, q=self.linear(n_q, WIDTH, 7), kv_norm=None)
        first = FlatLayer(
            attn_norm=_norm(WIDTH, 30),
            head_dim=HEAD_DIM,
            scale=0.15,
            output=compressed.output,
            latent=compressed,
            latent_spec=SPEC,
            ffn_norm=_norm(WIDTH, 31),
            gate=self.linear(N_FF, WIDTH, 8),
            up=self.linear(N_FF, WIDTH, 9),
            down=self.linear(WIDTH, N_FF, 40),
        )
        second = replace(first, latent=direct, attn_post_norm=_norm(WIDTH, 32), residual_scale=0.5)
        third = replace(first, gate=None, up=None, down=None, ffn_norm=None, scale=0.3)
        self.layers = [first, second, third][selected]
        codec = codec_of(KvType.F32, HEAD_DIM)
        layout = PageLayout(range(len(self.layers)), 1, HEAD_DIM, codec, codec, True)
        self.cache = PagedKvCache([layout], PagedKvCache.n_pages_for(600 + N_HELD, 3), 3, self.kernels.new_pages)

    def linear(self, n_out: int, n_in: int, seed: int, *, plain: bool = False) -> Linear:
        matrix = random_matrix(self._type, n_out, n_in, seed)
        weight = self.kernels.prepare(QuantizedTensor(f"w{seed}", matrix.shape, matrix.ggml_type, matrix.data))
        return Linear(weight, None if plain else np.array([2.0**-6], np.float32))  # so that sums stay finite

    def fused(self) -> FusedLayers:
        fused = fuse_layers(self.kernels, self.layers)
        assert fused is not None
        return fused

    def run(
        self, x: Rows, rotations: list[Rotation], plan: BatchPlan, output_mask: NDArray[np.bool_] | None = None
    ) -> Rows:
        (y,) = self.fused().run([x], rotations, plan, self.cache.layers, [None] * len(self.layers), output_mask)
        return y

    def plan(self, seq_ids: list[int]) -> BatchPlan:
        positions = np.array([seq_ids[:i].count(seq_id) for i, seq_id in enumerate(seq_ids)], np.int32)
        return self.kernels.place(self.cache.plan(np.array(seq_ids, np.int32), positions))

    def run_unfused(self, x: Rows, rotations: list[Rotation], plan: BatchPlan) -> Rows:
        kernels: Any = self.kernels
        for layer, rotation, cache in zip(self.layers, rotations, self.cache.layers, strict=True):
            step = layer.steps(kernels)[0]
            assert isinstance(step, MultiHeadLatentAttention)
            q, latents = step.queries_and_latents(x)
            keys = kernels.heads(latents, HEAD_DIM, None, rotation)
            cache.write(plan.pages, plan.slots, keys, keys)
            q = kernels.heads(q, HEAD_DIM, None, rotation)
            attention = step.expand(kernels.attention_over_runs(q, cache, plan, layer.scale))
            attention_output = kernels.linear(attention.reshape(len(x), -1), layer.output)
            after = x + kernels.normed(attention_output, layer.attn_post_norm) * np.float32(layer.residual_scale)
            if layer.up is None:
                x = after
                continue
            inner = kernels.gate_up(after, layer.ffn_norm, layer.gate, layer.up, layer.activation)
            x = after + kernels.linear(inner, layer.down) * np.float32(layer.residual_scale)
        return x


def _rotations(n_tokens: int) -> list[Rotation]:
    angles = np.random.default_rng(n_tokens).uniform(-9, 9, (3, n_tokens, N_ROTATED // 2)).astype(np.float32)
    return [Rotation(np.cos(each), np.sin(each), RopeStyle.INTERLEAVED) for each in angles]


@every_isa
@every_batch
@every_type
def test_fused_layers_equal_their_steps(isa: str, seq_ids: list[int], ggml_type: GgmlType) -> None:
    stack, n = LatentStack(isa, ggml_type), len(seq_ids)
    x, plan, rotations = _f32(n, WIDTH, seed=1), stack.plan(seq_ids), _rotations(n)
    expected = stack.run_unfused(x, rotations, plan)
    assert np.isfinite(expected).all()
    stored = [layer.keys(slice(0, 9), 9 * 64).copy() for layer in stack.cache.layers]
    np.testing.assert_array_equal(stack.run(x, rotations, plan), expected)
    output_mask = np.arange(n) % 3 == 1
    actual = stack.run(x, rotations, plan, output_mask)
    # Kernels for fewer rows may sum at most 288 terms in another order, in each of four consecutive products. With AMX,
    # many rows are rounded to bf16 and few rows to int8: half a step of 1/127 each, in three quantized products.
    rounds = isa in ("amx", "amx_plain") and ggml_type not in FLOATS
    tolerance = 3 / 254 if rounds else 4 * 288 * 2.0**-24
    np.testing.assert_allclose(actual, expected[output_mask], rtol=0, atol=tolerance * np.abs(expected).max())
    for layer, keys in zip(stack.cache.layers, stored, strict=True):
        np.testing.assert_array_equal(layer.keys(slice(0, 9), 9 * 64), keys)


@every_isa
@pytest.mark.parametrize("seq_ids", [[0] * 48, [0] * 200, [0] * 130 + [2] * 70], ids=["values", "keys", "two"])
@pytest.mark.parametrize(
    # Scores are so small that rounding does not change the softmax. Each int8 code errs by half a step, 1/254 of the
    # largest of 32 values, three times: in queries or keys, in latents or their means, in the last product.
    ("ggml_type", "scale", "share"),
    [(GgmlType.F32, 0.3, 1e-5), (GgmlType.Q8_0, 1e-5, 3 / 254)],
    ids=["F32", "Q8_0"],
)
def test_expanded_heads_equal_attention_over_latents(
    isa: str, seq_ids: list[int], ggml_type: GgmlType, scale: float, share: float
) -> None:
    """For many tokens the fused call expands values, or keys and values, per head; the steps attend over latents."""
    stack, n = LatentStack(isa, ggml_type, 32, ATTENTION_ONLY), len(seq_ids)
    stack.layers = [replace(stack.layers[0], scale=scale)]
    x, plan, rotations = _f32(n, WIDTH, seed=1), stack.plan(seq_ids), _rotations(n)[ATTENTION_ONLY]
    expected, actual = stack.run_unfused(x, rotations, plan), stack.run(x, rotations, plan)
    assert not np.array_equal(actual, expected), "the fused call attended over latents: it expanded no heads"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=share * np.abs(expected).max())


def test_long_histories_are_expanded_some_heads_at_a_time() -> None:
    """For a long history, keys and values are expanded for a few heads at a time."""
    stack = LatentStack(_extension.load().available_isas()[-1], GgmlType.F32, 64, ATTENTION_ONLY)

    def append(start: int, n: int) -> BatchPlan:
        plan = stack.cache.plan(np.zeros(n, np.int32), np.arange(start, start + n, dtype=np.int32))
        stack.cache.commit(plan)
        return stack.kernels.place(plan)

    history, latents = append(0, N_HELD), _f32(N_HELD, 1, HEAD_DIM, seed=3)
    stack.cache.layers[0].write(history.pages, history.slots, latents, latents)
    x, plan, rotations = _f32(128, WIDTH, seed=1), append(N_HELD, 128), _rotations(128)[ATTENTION_ONLY]
    expected, actual = stack.run_unfused(x, rotations, plan), stack.run(x, rotations, plan)
    assert not np.array_equal(actual, expected), "the fused call attended over latents: it expanded no heads"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@every_isa
def test_each_part_changes_the_output(isa: str) -> None:
    """Without any one part of the first layer, the output of the last layer differs: the fused call skips no part."""
    stack = LatentStack(isa, GgmlType.F32)
    x, plan, rotations = _f32(9, WIDTH, seed=1), stack.plan([0] * 9), _rotations(9)
    whole, original = stack.run(x, rotations, plan), stack.layers
    latent = original[0].latent
    assert latent is not None
    parts = {
        "attn_norm": replace(original[0], attn_norm=None),
        "scale": replace(original[0], scale=0.1),
        "q_norm": replace(original[0], latent=replace(latent, q_norm=None)),
        "kv_norm": replace(original[0], latent=replace(latent, kv_norm=None)),
        "q_down": replace(original[0], latent=replace(latent, q_down=stack.linear(N_LOW, WIDTH, 50))),
        "k_up": replace(original[0], latent=replace(latent, k_up=_with_heads_reversed(stack, latent))),
    }
    for name, layer in parts.items():
        stack.layers = [layer, *original[1:]]
        assert not np.array_equal(stack.run(x, rotations, plan), whole), name


def _with_heads_reversed(stack: LatentStack, latent: LatentAttention) -> Any:
    """The same matrices in reverse order of heads."""
    weights = latent.k_up.weights  # type: ignore[attr-defined]
    return type(latent.k_up)(stack.kernels._native, weights[::-1])


def test_mismatched_parts_are_refused() -> None:
    stack = LatentStack("scalar", GgmlType.F32)
    first, latent = stack.layers[0], stack.layers[0].latent
    assert latent is not None

    def assert_refused(match: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            fuse_layers(stack.kernels, [replace(first, **changes)])

    def per_head(n: int, n_out: int, n_in: int) -> Any:
        return stack.kernels.per_head([stack.linear(n_out, n_in, i, plain=True) for i in range(n)])

    assert_refused(r"q is \[144, 64\], not \[144, 128\]", latent=replace(latent, q=stack.linear(144, 64, 1)))
    assert_refused("q_norm must have the width 128", latent=replace(latent, q_norm=_norm(64, 1)))
    assert_refused("kv_norm must have the width 64", latent=replace(latent, kv_norm=_norm(80, 1)))
    assert_refused("q_norm without q_down", latent=replace(latent, q_down=None))
    assert_refused("kv_down must be wider than the latent", latent=replace(latent, kv_down=stack.linear(64, WIDTH, 1)))
    assert_refused("need one matrix per head", latent=replace(latent, v_up=per_head(2, N_RESULT, N_RANK)))
    assert_refused("of different shapes, or of another latent", latent=replace(latent, v_up=per_head(3, N_RESULT, 32)))
    assert_refused("not the width of the latent", head_dim=16)
    assert_refused(r"output is \[96, 64\], not \[96, 288\]", output=stack.linear(WIDTH, 64, 1))


def test_latents_combined_with_parts_of_plain_attention_are_refused() -> None:
    """C++ refuses them, although no step combines them."""
    stack = LatentStack("scalar", GgmlType.F32)
    first = stack.layers[0]
    native_layer_unchecked(first)
    with pytest.raises(ValueError, match="a layer needs q, output"):
        native_layer_unchecked(replace(first, q=stack.linear(N_HEADS * HEAD_DIM, WIDTH, 1)))
    with pytest.raises(ValueError, match="takes no k, per-head norms or limit"):
        native_layer_unchecked(replace(first, qkv_limit=0.5))


def test_layers_without_kernels_are_not_fused() -> None:
    stack = LatentStack("scalar", GgmlType.F32)
    first, latent = stack.layers[0], stack.layers[0].latent
    assert latent is not None
    iq = random_matrix(GgmlType.IQ2_XS, HEAD_DIM, 256, 1)
    kv_down = Linear(stack.kernels.prepare(QuantizedTensor("iq", iq.shape, iq.ggml_type, iq.data)))
    assert fuse_layers(stack.kernels, [replace(first, latent=replace(latent, kv_down=kv_down))]) is None
