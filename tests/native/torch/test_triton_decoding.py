"""Paged decode attention in Triton's interpreter, against the reference tier one sequence at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slm_core.architectures import NormKind, RopeStyle
from slm_native.kernels import Norm, Rotation, Scoring
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kv import PagedKvCache, PageLayout, codec_of

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are tested in Triton's interpreter: pip install triton")

from slm_native.kernels.torch.pages import TorchPageStore, place  # noqa: E402
from slm_native.kernels.torch.triton import decoding  # noqa: E402
from slm_native.kernels.torch.triton.decoding import attend_decoding  # noqa: E402

HELD = (1, 64, 65, 140)
SCORINGS = {
    "plain": {},
    "window": {"window": 70},
    "narrow": {"window": 3},
    "softcap": {"softcap": 1.5},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True},
    "all": {"window": 100, "softcap": 2.0, "slopes": True, "sinks": True},
}


def filled_layer(n_kv_heads: int, width: int, keys: str, values: str):
    """A layer of a KV cache with shuffled pages, and a plan that appends the last token of each sequence."""
    layout = PageLayout(range(2), n_kv_heads, width, codec_of(keys, width), codec_of(values, width))
    cpu = torch.device("cpu")
    cache = PagedKvCache(
        [layout],
        PagedKvCache.n_pages_for(1024, len(HELD) + 1),
        len(HELD) + 1,
        lambda shape, n: TorchPageStore(shape, n, cpu),
    )
    rng = np.random.default_rng(1)
    for start, end in (
        (0, 50),
        (50, 150),
        (150, 400),
    ):  # interleaved, so that the pages of a sequence are not contiguous
        for seq_id, length in enumerate(HELD):
            if start < length - 1:
                write(cache, seq_id, (start, min(length - 1, end)), (n_kv_heads, width), rng)
    plan = cache.plan(np.arange(len(HELD), dtype=np.int32), np.array(HELD, np.int32) - 1)
    placed = place(plan)
    k, v = (rng.standard_normal((len(HELD), n_kv_heads, width)).astype(np.float32) for _ in range(2))
    cache.layers[1].write(placed.pages, placed.slots, torch.from_numpy(k), torch.from_numpy(v))
    return cache.layers[1], placed


def write(cache, seq_id: int, position_range: tuple[int, int], heads: tuple[int, int], rng) -> None:
    n = position_range[1] - position_range[0]
    plan = cache.plan(np.full(n, seq_id, np.int32), np.arange(*position_range, dtype=np.int32))
    placed = place(plan)
    k, v = (torch.from_numpy(rng.standard_normal((n, *heads)).astype(np.float32)) for _ in range(2))
    cache.layers[1].write(placed.pages, placed.slots, k, v)
    cache.commit(plan)


def attended(q, layer, group, scale, scoring, dtype):
    """The result for the sequences' queries [B, H, D], which are rows of a larger batch, in another order."""
    rows, batch = torch.tensor([5, 0, 3, 1])[: len(q)], torch.full((6, *q.shape[1:]), torch.nan)
    batch[rows] = q
    out = torch.full(batch.shape, torch.nan)
    attend_decoding(batch, layer, dataclasses.replace(group, rows=rows), scale, scoring, dtype=dtype, out=out)
    assert out[[2, 4]].isnan().all(), "a row of another sequence was written"
    return out[rows]


def assert_equals_reference(scoring, n_heads=6, n_kv_heads=2, width=32, keys="f32", values="f32", dtype=None):
    layer, placed = filled_layer(n_kv_heads, width, keys, values)
    rng = np.random.default_rng(2)
    q = rng.standard_normal((len(HELD), n_heads, width)).astype(np.float32)
    options = {
        name: rng.uniform(0.02, 1, n_heads).astype(np.float32) if value is True else value
        for name, value in SCORINGS[scoring].items()
    }
    on_device = Scoring(
        **{name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    )
    group = placed.decodes
    actual = attended(torch.from_numpy(q), layer, group, 0.2, on_device, dtype or torch.float32).numpy()
    if dtype is not None:
        q = torch.from_numpy(q).to(dtype).float().numpy()
    for i, length in enumerate(HELD):
        k, v = (read(group.tables[i], length).numpy() for read in (layer.keys, layer.values))
        expected = ReferenceKernels().attention(q[i : i + 1], k, v, 0.2, Scoring(**options))[0]
        # Scores are about 0.2 * sqrt(width) = 1, at most 8: float32 changes weights by a few times 8 * 2^-24. Half
        # precision rounds keys, weights and values once each: 2^-11 of values of about 1, at most 4.
        bound = 1e-5 if dtype is None else 3 * 4 * 2.0**-11
        np.testing.assert_allclose(actual[i], expected, atol=bound, err_msg=f"sequence of {length} tokens")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_every_scoring_option(scoring):
    assert_equals_reference(scoring)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (5, 1), (34, 2)])
@pytest.mark.parametrize("width", [32, 24])
def test_groups_and_widths(n_heads, n_kv_heads, width):
    assert_equals_reference("plain", n_heads, n_kv_heads, width)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        *(("f32", "f16"), ("f16", "q8_0"), ("q8_0", "bf16"), ("bf16", "q6_0"), ("q6_0", "q5_0")),
        *(("q5_0", "q4_0"), ("q4_0", "f8_e4m3"), ("f8_e4m3", "f32")),
    ],
)
def test_kv_types(keys, values):
    assert_equals_reference("plain", width=64, keys=keys, values=values)


def test_products_in_half_precision():
    assert_equals_reference("plain", dtype=torch.float16)


HALF, INTERLEAVED, MANY = RopeStyle.HALF_SPLIT, RopeStyle.INTERLEAVED, decoding._PROGRAMS


@pytest.mark.parametrize(
    ("kv_type", "style", "n_dims", "normed", "n_programs"),
    [  # each KV type with each style, and each style with one program and with many
        ("f32", HALF, 64, True, 1),
        ("f32", INTERLEAVED, 64, False, MANY),
        ("f32", HALF, 24, True, 1),
        ("f16", HALF, 64, True, MANY),
        ("f16", INTERLEAVED, 64, False, 1),
        ("f16", HALF, 24, True, MANY),
        ("q8_0", HALF, 64, True, 1),
        ("q8_0", INTERLEAVED, 64, False, MANY),
        ("q8_0", HALF, 24, True, MANY),
    ],
)
def test_new_tokens_are_written_and_attended_to(monkeypatch, kv_type, style, n_dims, normed, n_programs):
    """Projections are parts of longer rows. Nothing but the new keys and values is written."""
    monkeypatch.setattr(decoding, "_PROGRAMS", n_programs)
    layer, placed = filled_layer(2, 64, kv_type, kv_type)
    every = torch.arange(layer.n_pages)
    before = [x.clone() for x in (layer.keys(every, layer.n_pages * 64), layer.values(every, layer.n_pages * 64))]
    tokens, n_tokens, generator = torch.tensor([5, 0, 3, 1]), 6, torch.Generator().manual_seed(1)
    projected = torch.randn(n_tokens, (6 + 2 + 2) * 64, generator=generator)
    q, k, v = projected.split([6 * 64, 2 * 64, 2 * 64], dim=1)
    angles = torch.randn(n_tokens, n_dims // 2, generator=generator) * 3
    weights = [torch.rand(64, generator=generator) for _ in range(2)]
    pages, slots = torch.full((n_tokens,), -1), torch.full((n_tokens,), -1)
    pages[tokens], slots[tokens] = placed.pages, placed.slots
    norms = [(weight, 1e-5) if normed else None for weight in weights]
    new = decoding.NewTokens(k, v, *norms, angles.cos(), angles.sin(), style, pages, slots)
    out = torch.full((n_tokens, 6, 64), torch.nan)
    group = dataclasses.replace(placed.decodes, rows=tokens)
    attend_decoding(q.unflatten(1, (6, 64)), layer, group, 0.2, dtype=torch.float32, out=out, new=new)
    assert not layer.arrivals.any(), "a later launch would begin with arrivals of this one"
    assert out[[2, 4]].isnan().all(), "a row of another sequence was written"

    reference, rotation = ReferenceKernels(), Rotation(angles.cos().numpy(), angles.sin().numpy(), style)
    norms = [Norm(weight.numpy(), None, NormKind.RMS, 1e-5) if normed else None for weight in weights]
    q_heads, k_heads = (
        reference.heads(x.numpy().copy(), 64, norm, rotation) for x, norm in zip((q, k), norms, strict=True)
    )
    codec, flat = codec_of(kv_type, 64), (placed.pages * 64 + placed.slots).numpy()
    after = [layer.keys(every, layer.n_pages * 64), layer.values(every, layer.n_pages * 64)]
    for original, stored, heads in zip(before, after, (k_heads, v.numpy().reshape(-1, 2, 64)), strict=True):
        expected = codec.decode(codec.encode(heads[tokens.numpy()]))
        step = {"f32": 1e-6, "f16": 2.0**-11, "q8_0": 1 / 127}[kv_type] * np.abs(expected).max()
        np.testing.assert_allclose(stored.numpy().reshape(-1, 2, 64)[flat], expected, atol=1.01 * step)
        stored.view(-1, 2, 64)[flat] = original.view(-1, 2, 64)[flat]
        assert torch.equal(stored, original), "another key or value was written"
    for i, length in enumerate(HELD):
        held_keys, held_values = (read(group.tables[i], length).numpy() for read in (layer.keys, layer.values))
        expected = reference.attention(q_heads[tokens[i]][None], held_keys, held_values, 0.2)[0]
        np.testing.assert_allclose(out[tokens[i]], expected, atol=1e-5, err_msg=f"sequence of {length} tokens")


def test_a_kernel_of_its_own_combines_splits_of_many_heads(monkeypatch):
    """As for more heads than there are counters."""
    joined, join = [], decoding._join
    monkeypatch.setattr(decoding, "_join", {(len(HELD) * 6,): lambda *args, **named: join_once(*args, **named)})
    monkeypatch.setattr("slm_native.kernels.torch.pages._N_ARRIVALS", 7)

    def join_once(*args, **named):
        joined.append(args)
        join[(len(HELD) * 6,)](*args, **named)

    assert_equals_reference("all")
    assert len(joined) == 1


@pytest.mark.parametrize(
    ("n_programs", "tile_bytes"),
    [(1, 1), (8 * 2, decoding._TILE_BYTES), (8 * 3, 1), (8 * 100, 1), (8 * 100, decoding._TILE_BYTES)],
)
def test_tiles_may_be_divided_among_any_number_of_programs(monkeypatch, n_programs, tile_bytes):
    """Tiles of whole pages and of 16 tokens; 100 programs for each head are more than there are tiles."""
    monkeypatch.setattr(decoding, "_PROGRAMS", n_programs)
    monkeypatch.setattr(decoding, "_TILE_BYTES", tile_bytes)
    monkeypatch.setattr(decoding, "_JOINED", 64)
    assert_equals_reference("all")


def test_tables_may_be_wider_than_sequences():
    layer, placed = filled_layer(2, 32, "f32", "f32")
    group, q = placed.decodes, torch.randn(len(HELD), 6, 32, generator=torch.Generator().manual_seed(1))
    wide = torch.nn.functional.pad(group.tables, (0, 13))
    narrow, padded = (
        attended(q, layer, dataclasses.replace(group, tables=tables), 0.2, Scoring(), torch.float32)
        for tables in (group.tables, wide)
    )
    torch.testing.assert_close(padded, narrow, rtol=1e-5, atol=1e-6)  # sums in another order


def test_wrong_arguments_are_refused():
    layer, placed = filled_layer(2, 32, "f32", "f32")
    q = torch.zeros(len(HELD), 6, 32)
    for bad in (q.half(), torch.zeros(len(HELD), 5, 32), torch.zeros(len(HELD), 6, 16), q.transpose(0, 1)):
        with pytest.raises(ValueError, match="accepted: "):
            attend_decoding(bad, layer, placed.decodes, 0.2, dtype=torch.float32, out=torch.zeros(bad.shape))
    with pytest.raises(ValueError, match="out is"):
        attend_decoding(q, layer, placed.decodes, 0.2, dtype=torch.float32, out=q[:3])
    k, angles, places = torch.zeros(len(HELD), 2 * 32), torch.zeros(len(HELD), 16), torch.zeros(len(HELD), dtype=int)
    style = RopeStyle.INTERLEAVED
    for bad in (
        decoding.NewTokens(k[:, :-1], k, None, None, angles, angles, style, places, places),
        decoding.NewTokens(k, k.T.contiguous().T, None, None, angles, angles, style, places, places),
        decoding.NewTokens(k, k, (angles[0], 1e-5), None, angles, angles, style, places, places),
        decoding.NewTokens(k, k, None, None, k[:, :17].contiguous(), k[:, :17].contiguous(), style, places, places),
        decoding.NewTokens(k, k, None, None, angles, angles, style, places.int(), places),
    ):
        with pytest.raises(ValueError, match="accepted: "):
            attend_decoding(q, layer, placed.decodes, 0.2, dtype=torch.float32, out=torch.zeros(q.shape), new=bad)
    new = decoding.NewTokens(k, k, None, None, angles, angles, style, places, places)
    for keys, values in (("bf16", "f32"), ("f32", "q4_0")):
        layer, placed = filled_layer(2, 32, keys, values)
        with pytest.raises(ValueError, match="accepted: f16, f32, q8_0"):
            attend_decoding(q, layer, placed.decodes, 0.2, dtype=torch.float32, out=torch.zeros(q.shape), new=new)
