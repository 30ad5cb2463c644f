"""Blocks that attend to latents, as the cpu tier fuses them, against the steps that they are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from native.flat_layers import FlatLayer, OneCall, native_layer_as_told, one_call
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
N_HELD = 11_000  # so many that keys and values of all heads are not made at once
LAST = slice(2, 3)  # attention alone
SPEC = LatentSpec(n_nope=N_NOPE, n_rank=N_RANK, n_value=N_RESULT)
every_isa = pytest.mark.parametrize("isa", _extension.load().available_isas())
every_batch = pytest.mark.parametrize("seq_ids", [[0], [0] * 7, [1] * 130, [0, 2, 1], [2, 0, 2, 2, 0, 1]], ids=len)
every_type = pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.Q8_0], ids=lambda t: t.name)


def _f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _norm(width: int, seed: int) -> Norm:
    return Norm(_f32(width, seed=seed), None, NormKind.RMS, 1e-3)


class LatentBlocks:
    """Queries compressed and not, with all norms and with few; one without a feed-forward layer; and a cache."""

    def __init__(self, isa: str, ggml_type: GgmlType, n_result: int = N_RESULT, only: slice = slice(None)) -> None:
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
        self.blocks = [first, second, third][only]
        codec = codec_of(KvType.F32, HEAD_DIM)
        layout = PageLayout(range(len(self.blocks)), 1, HEAD_DIM, codec, codec, True)
        self.cache = PagedKvCache([layout], PagedKvCache.n_pages_for(600 + N_HELD, 3), 3, self.kernels.new_pages)

    def linear(self, n_out: int, n_in: int, seed: int, *, plain: bool = False) -> Linear:
        matrix = random_matrix(self._type, n_out, n_in, seed)
        weight = self.kernels.prepare(QuantizedTensor(f"w{seed}", matrix.shape, matrix.ggml_type, matrix.data))
        return Linear(weight, None if plain else np.array([2.0**-6], np.float32))  # lest sums explode

    def fused(self) -> OneCall:
        fused = one_call(self.kernels, self.blocks)
        assert fused is not None
        return fused

    def run(self, x: Rows, rotations: list[Rotation], plan: BatchPlan, some: NDArray[np.bool_] | None = None) -> Rows:
        (y,) = self.fused().run([x], rotations, plan, self.cache.layers, [None] * len(self.blocks), some)
        return y

    def plan(self, seq_ids: list[int]) -> BatchPlan:
        positions = np.array([seq_ids[:i].count(seq_id) for i, seq_id in enumerate(seq_ids)], np.int32)
        return self.kernels.place(self.cache.plan(np.array(seq_ids, np.int32), positions))

    def step_by_step(self, x: Rows, rotations: list[Rotation], plan: BatchPlan) -> Rows:
        kernels: Any = self.kernels
        for block, rotation, cache in zip(self.blocks, rotations, self.cache.layers, strict=True):
            step = block.steps(kernels)[0]
            assert isinstance(step, MultiHeadLatentAttention)
            q, latents = step.queries_and_latents(x)
            keys = kernels.heads(latents, HEAD_DIM, None, rotation)
            cache.write(plan.pages, plan.slots, keys, keys)
            q = kernels.heads(q, HEAD_DIM, None, rotation)
            mixed = step.expand(kernels.attention_over_runs(q, cache, plan, block.scale))
            made = kernels.linear(mixed.reshape(len(x), -1), block.output)
            after = x + kernels.normed(made, block.attn_post_norm) * np.float32(block.residual_scale)
            if block.up is None:
                x = after
                continue
            inner = kernels.gate_up(after, block.ffn_norm, block.gate, block.up, block.activation)
            x = after + kernels.linear(inner, block.down) * np.float32(block.residual_scale)
        return x


def _rotations(n_tokens: int) -> list[Rotation]:
    angles = np.random.default_rng(n_tokens).uniform(-9, 9, (3, n_tokens, N_ROTATED // 2)).astype(np.float32)
    return [Rotation(np.cos(each), np.sin(each), RopeStyle.INTERLEAVED) for each in angles]


@every_isa
@every_batch
@every_type
def test_blocks_are_their_steps(isa: str, seq_ids: list[int], ggml_type: GgmlType) -> None:
    blocks, n = LatentBlocks(isa, ggml_type), len(seq_ids)
    x, plan, rotations = _f32(n, WIDTH, seed=1), blocks.plan(seq_ids), _rotations(n)
    wanted = blocks.step_by_step(x, rotations, plan)
    assert np.isfinite(wanted).all()
    stored = [layer.keys(slice(0, 9), 9 * 64).copy() for layer in blocks.cache.layers]
    np.testing.assert_array_equal(blocks.run(x, rotations, plan), wanted)
    some = np.arange(n) % 3 == 1
    found = blocks.run(x, rotations, plan, some)
    # Sums of fewer rows may be made in another order: of at most 288 terms, each of four products one after the other.
    # DenseAndMoe a matrix unit's bf16 activations of few rows are int8: half a step of 127 each, here of three blocks.
    rounds = isa in ("amx", "amx_plain") and ggml_type not in FLOATS
    tolerance = 3 / 254 if rounds else 4 * 288 * 2.0**-24
    np.testing.assert_allclose(found, wanted[some], rtol=0, atol=tolerance * np.abs(wanted).max())
    for layer, keys in zip(blocks.cache.layers, stored, strict=True):
        np.testing.assert_array_equal(layer.keys(slice(0, 9), 9 * 64), keys)


@every_isa
@pytest.mark.parametrize("seq_ids", [[0] * 48, [0] * 200, [0] * 130 + [2] * 70], ids=["values", "keys", "two"])
@pytest.mark.parametrize(
    # Scores small enough that rounding tips none. Codes are off by half of a 127th of the largest of 32, three times:
    # those of queries or keys, of latents or their mixtures, and of what the output matrix reads.
    ("ggml_type", "scale", "share"),
    [(GgmlType.F32, 0.3, 1e-5), (GgmlType.Q8_0, 1e-5, 3 / 254)],
    ids=["F32", "Q8_0"],
)
def test_heads_of_their_own_make_what_latents_do(
    isa: str, seq_ids: list[int], ggml_type: GgmlType, scale: float, share: float
) -> None:
    """Many tokens meet values made for each head, or keys, too, where that is less work; steps mix latents."""
    blocks, n = LatentBlocks(isa, ggml_type, 32, LAST), len(seq_ids)
    blocks.blocks = [replace(blocks.blocks[0], scale=scale)]
    x, plan, rotations = _f32(n, WIDTH, seed=1), blocks.plan(seq_ids), _rotations(n)[LAST]
    wanted, found = blocks.step_by_step(x, rotations, plan), blocks.run(x, rotations, plan)
    assert not np.array_equal(found, wanted), "latents were mixed: this says nothing of heads"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * np.abs(wanted).max())


def test_some_heads_at_a_time() -> None:
    """Behind a long history what some heads have of their own is made after that of others."""
    blocks = LatentBlocks(_extension.load().available_isas()[-1], GgmlType.F32, 64, LAST)

    def planned(start: int, n: int) -> BatchPlan:
        plan = blocks.cache.plan(np.zeros(n, np.int32), np.arange(start, start + n, dtype=np.int32))
        blocks.cache.commit(plan)
        return blocks.kernels.place(plan)

    held, latents = planned(0, N_HELD), _f32(N_HELD, 1, HEAD_DIM, seed=3)
    blocks.cache.layers[0].write(held.pages, held.slots, latents, latents)
    x, plan, rotations = _f32(128, WIDTH, seed=1), planned(N_HELD, 128), _rotations(128)[LAST]
    wanted, found = blocks.step_by_step(x, rotations, plan), blocks.run(x, rotations, plan)
    assert not np.array_equal(found, wanted), "latents were mixed: this says nothing of heads"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@every_isa
def test_each_part_of_it_matters(isa: str) -> None:
    """What is left out of one block changes what leaves the last: no part is passed over."""
    blocks = LatentBlocks(isa, GgmlType.F32)
    x, plan, rotations = _f32(9, WIDTH, seed=1), blocks.plan([0] * 9), _rotations(9)
    whole, original = blocks.run(x, rotations, plan), blocks.blocks
    latent = original[0].latent
    assert latent is not None
    parts = {
        "attn_norm": replace(original[0], attn_norm=None),
        "scale": replace(original[0], scale=0.1),
        "q_norm": replace(original[0], latent=replace(latent, q_norm=None)),
        "kv_norm": replace(original[0], latent=replace(latent, kv_norm=None)),
        "q_down": replace(original[0], latent=replace(latent, q_down=blocks.linear(N_LOW, WIDTH, 50))),
        "k_up": replace(original[0], latent=replace(latent, k_up=_exchanged(blocks, latent))),
    }
    for name, block in parts.items():
        blocks.blocks = [block, *original[1:]]
        assert not np.array_equal(blocks.run(x, rotations, plan), whole), name


def _exchanged(blocks: LatentBlocks, latent: LatentAttention) -> Any:
    """The same matrices for other heads."""
    weights = latent.k_up.weights  # type: ignore[attr-defined]
    return type(latent.k_up)(blocks.kernels._native, weights[::-1])


def test_what_does_not_fit_is_refused() -> None:
    blocks = LatentBlocks("scalar", GgmlType.F32)
    first, latent = blocks.blocks[0], blocks.blocks[0].latent
    assert latent is not None

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            one_call(blocks.kernels, [replace(first, **changes)])

    def by_head(n: int, n_out: int, n_in: int) -> Any:
        return blocks.kernels.per_head([blocks.linear(n_out, n_in, i, plain=True) for i in range(n)])

    refused(r"q is \[144, 64\], not \[144, 128\]", latent=replace(latent, q=blocks.linear(144, 64, 1)))
    refused("q_norm has not the width 128", latent=replace(latent, q_norm=_norm(64, 1)))
    refused("kv_norm has not the width 64", latent=replace(latent, kv_norm=_norm(80, 1)))
    refused("q_norm without q_down", latent=replace(latent, q_down=None))
    refused("kv_down makes no more than the latent", latent=replace(latent, kv_down=blocks.linear(64, WIDTH, 1)))
    refused("not one for each head", latent=replace(latent, v_up=by_head(2, N_RESULT, N_RANK)))
    refused("for one latent", latent=replace(latent, v_up=by_head(3, N_RESULT, 32)))
    refused("as wide as what kv_down makes", head_dim=16)
    refused(r"output is \[96, 64\], not \[96, 288\]", output=blocks.linear(WIDTH, 64, 1))


def test_latents_with_what_only_heads_have_are_refused() -> None:
    """No step has both; C++ refuses them all the same."""
    blocks = LatentBlocks("scalar", GgmlType.F32)
    first = blocks.blocks[0]
    native_layer_as_told(first)
    with pytest.raises(ValueError, match="a layer without q, output"):
        native_layer_as_told(replace(first, q=blocks.linear(N_HEADS * HEAD_DIM, WIDTH, 1)))
    with pytest.raises(ValueError, match="with keys, norms of heads or a limit"):
        native_layer_as_told(replace(first, qkv_limit=0.5))


def test_matrices_without_kernels_are_not_fused() -> None:
    blocks = LatentBlocks("scalar", GgmlType.F32)
    first, latent = blocks.blocks[0], blocks.blocks[0].latent
    assert latent is not None
    iq = random_matrix(GgmlType.IQ2_XS, HEAD_DIM, 256, 1)
    kv_down = Linear(blocks.kernels.prepare(QuantizedTensor("iq", iq.shape, iq.ggml_type, iq.data)))
    assert one_call(blocks.kernels, [replace(first, latent=replace(latent, kv_down=kv_down))]) is None
