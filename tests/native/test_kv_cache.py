"""The paged KV cache: pages against a list of tokens, free positions against the ledger, codecs against ggml."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.context.ledger import Ledger
from slm_core.context.payload import SectionWriter
from slm_core.errors import InvalidOption
from slm_core.types import KvType
from slm_native.kv import PAGE_TOKENS, PagedKvCache, PageLayout, codec_of


def layout(n_layers: int = 2, n_kv_heads: int = 3, head_dim: int = 4, kv_type: str = "f32") -> PageLayout:
    codec = codec_of(kv_type, head_dim)
    return PageLayout(range(n_layers), n_kv_heads, head_dim, codec, codec)


N_REPLAYED = 70
HEADS = ((3, 4), (1, 6), (3, 4))
"""Heads and head width of each layer. The first and the last layer are one group, the layer between them another."""


class Model:
    """A KV cache, the ledger that counts its positions, and the expected tokens of every sequence.

    A token is a number that determines its keys and values. A key also depends on its position: instead of RoPE, layer
    i adds (i + 1) times the position."""

    def __init__(self, n_ctx: int, n_seq_max: int) -> None:
        outer, inner = layout(), layout(n_kv_heads=1, head_dim=6)
        layouts = [replace(outer, blocks=(0, 2)), replace(inner, blocks=(1,))]
        n_pages = PagedKvCache.n_pages_for(n_ctx, n_seq_max)
        self.cache = PagedKvCache(layouts, n_pages, n_seq_max, n_replayed=N_REPLAYED)
        self.ledger = Ledger(n_ctx, n_seq_max, share_forks=True)
        self.n_seq_max = n_seq_max
        self.expected_tokens: list[list[int]] = [[] for _ in range(n_seq_max)]
        self.next_token = 0

    def append(self, counts: dict[int, int], *, fail: bool = False) -> bool:
        if not 0 < sum(counts.values()) <= self.ledger.n_free:
            return False
        seq_ids = np.repeat(list(counts), list(counts.values())).astype(np.int32)
        starts = {seq_id: len(self.expected_tokens[seq_id]) for seq_id in counts}
        positions = np.concatenate([np.arange(starts[s], starts[s] + n) for s, n in counts.items()]).astype(np.int32)
        new_tokens = np.arange(self.next_token, self.next_token + len(seq_ids))
        self.next_token += len(new_tokens)
        plan = self.cache.plan(seq_ids, positions)
        for i, layer in enumerate(self.cache.layers):
            layer.write(plan.pages, plan.slots, self.numbers(new_tokens, i, positions), self.numbers(new_tokens, i))
        if fail:
            return True
        self.cache.commit(plan)
        for seq_id in counts:
            tokens = new_tokens[seq_ids == seq_id].tolist()
            self.ledger.append(seq_id, tokens)
            self.expected_tokens[seq_id] += tokens
        return True

    def fork(self, src: int, dst: int, end: int) -> None:
        self.cache.fork(src, dst, end)
        self.ledger.fork(src, dst, end)
        self.expected_tokens[dst] = self.expected_tokens[src][:end]

    def truncate(self, seq_id: int, length: int) -> None:
        self.cache.truncate(seq_id, length)
        self.ledger.truncate(seq_id, length)
        del self.expected_tokens[seq_id][length:]

    def cut(self, seq_id: int, start: int, end: int) -> bool:
        if self.ledger.cut_cost(seq_id, start, end) > self.ledger.n_free:
            return False
        self.cache.cut(seq_id, start, end, len(self.expected_tokens[seq_id]), self.rotate)
        self.ledger.cut(seq_id, start, end)
        del self.expected_tokens[seq_id][start:end]
        return True

    def drop(self, seq_id: int) -> None:
        self.cache.drop(seq_id)
        self.ledger.drop(seq_id)
        self.expected_tokens[seq_id] = []

    def copy(self, src: int, dst: int, start: int) -> bool:
        """Export the tokens of a sequence from ``start`` on, and import them into an empty one that shares the rest."""
        tokens = self.expected_tokens[src]
        if len(tokens) - start > self.ledger.n_free:
            return False
        payload = b"".join(self.cache.export(src, len(tokens), start))
        pages = self.cache.continued(src, start, len(tokens)) if start else self.cache.free(len(tokens))
        assert pages is not None, "an empty sequence leaves room for what the ledger has room for"
        SectionWriter(self.cache.sections(None, len(tokens), start)).write(memoryview(payload))
        writer = SectionWriter(self.cache.sections(pages, len(tokens), start))
        writer.write(memoryview(payload))
        writer.check_whole()
        self.cache.put(dst, pages, 0)
        self.ledger.fork(src, dst, start)
        self.ledger.append(dst, tokens[start:])
        self.expected_tokens[dst] = list(tokens)
        return True

    def replay(self, seq_id: int, start: int) -> None:
        """Write other numbers for the tokens from ``start`` on: they must go to scratch pages."""
        length = len(self.expected_tokens[seq_id])
        plan = self.cache.replay(seq_id, start, length)
        (run,) = plan.runs
        assert (run.start, run.n_held, run.rows) == (start, length, slice(0, length - start))
        places = {(int(page), int(slot)) for page, slot in zip(plan.pages, plan.slots, strict=True)}
        assert len(places) == length - start
        others = np.full(length - start, -1)
        for i, layer in enumerate(self.cache.layers):
            layer.write(plan.pages, plan.slots, self.numbers(others, i), self.numbers(others, i))

    def rotate(self, keys: np.ndarray, delta: int, blocks) -> np.ndarray:
        return keys + delta * (np.array(blocks, np.float32)[:, None, None] + 1)

    def numbers(self, tokens, layer: int, positions=0) -> np.ndarray:
        """[T, K, D]: integers that float32 represents exactly."""
        first = 32 * (np.asarray(tokens) * 3 + layer) + np.asarray(positions) * (layer + 1)
        n_kv_heads, head_dim = HEADS[layer]
        offsets = np.arange(n_kv_heads * head_dim).reshape(n_kv_heads, head_dim)
        return (first[:, None, None] + offsets).astype(np.float32)

    def check(self) -> None:
        for seq_id, tokens in enumerate(self.expected_tokens):
            n, pages = len(tokens), list(self.cache.tables[seq_id])
            assert len(pages) == -(-n // PAGE_TOKENS), f"sequence {seq_id} of {n} tokens holds {len(pages)} pages"
            for i, layer in enumerate(self.cache.layers):
                index = np.array(pages, np.intp)
                expected = self.numbers(tokens, i, np.arange(n)) if n else np.empty((0, *HEADS[i]), np.float32)
                np.testing.assert_array_equal(layer.keys(index, n), expected)
                expected = self.numbers(tokens, i) if n else expected
                np.testing.assert_array_equal(layer.values(index, n), expected)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "append all", "fail", "fork", "truncate", "cut", "drop", "copy", "copy tail", "replay"]
        ),
        st.integers(0, 3),
        st.integers(0, 3),
        st.floats(0, 1),
        st.floats(0, 1),
    ),
    max_size=40,
)


def apply(model: Model, operation) -> None:
    """Run one random operation if it is allowed; counts are chosen to end near page boundaries."""
    name, a, b, x, y = operation
    length = len(model.expected_tokens[a])
    low, high = sorted((int(x * length), int(y * length)))
    if name == "append":
        model.append({a: min(1 + int(x * 130), max(1, model.ledger.n_free))})
    elif name in ("append all", "fail"):
        model.append(dict.fromkeys(range(model.n_seq_max), 1 + int(x * 3)), fail=name == "fail")
    elif name == "fork" and a != b and not model.expected_tokens[b] and high:
        model.fork(a, b, high)
    elif name == "truncate" and low < length:
        model.truncate(a, low)
    elif name == "cut" and low < high < length:
        model.cut(a, low, high)
    elif name in ("copy", "copy tail") and length and a != b and not model.expected_tokens[b]:
        model.copy(a, b, low if name == "copy tail" else 0)
    elif name == "replay" and length:
        model.replay(a, max(low, length - N_REPLAYED) if low < length else length - 1)
    elif name == "drop" and length:
        model.drop(a)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(100, 400))
def test_pages_hold_the_written_tokens_and_never_run_out(operations, n_ctx):
    """An operation that fits the ledger never runs out of pages (``PageTables.free``)."""
    model = Model(n_ctx, n_seq_max=4)
    for operation in operations:
        apply(model, operation)
        model.check()


@pytest.mark.parametrize("end", [1, 63, 64, 65, 127])
def test_pages_suffice_if_every_sequence_is_a_fork(end):
    """The worst case for whole pages: every sequence shares all but its last token, and all diverge at once."""
    n_seq_max = 40
    model = Model(n_ctx=end + 2 * n_seq_max, n_seq_max=n_seq_max)
    model.append({0: end})
    for dst in range(1, n_seq_max):
        model.fork(dst - 1, dst, end)
    assert model.append(dict.fromkeys(range(n_seq_max), 1), fail=True)
    model.check()
    assert model.append(dict.fromkeys(range(n_seq_max), 2))
    assert model.ledger.n_free == 0
    model.check()


def test_a_cut_of_exclusive_positions_works_without_free_pages():
    model = Model(n_ctx=640, n_seq_max=2)
    model.append({0: 320})
    model.fork(0, 1, 320)
    model.append({1: 320})
    assert model.ledger.n_free == 0
    assert model.cut(1, 10, 330)
    model.check()


def test_a_replay_has_as_many_pages_of_its_own_as_it_can_need():
    """Tokens from the last slot of a page on, so that they are on one page more than they fill."""
    model = Model(n_ctx=200, n_seq_max=2)
    model.append({0: 63 + N_REPLAYED})
    model.replay(0, 63)
    model.check()
    outer, inner = 2 * 2 * 3 * 4, 2 * 1 * 6  # numbers of a token
    assert model.cache.n_bytes == (PagedKvCache.n_pages_for(200, 2) + 3) * PAGE_TOKENS * 4 * (outer + inner)


def test_tokens_that_the_ledger_does_not_know_are_overwritten():
    """As after an interrupt between ``commit`` and the ledger."""
    model = Model(n_ctx=300, n_seq_max=2)
    model.append({0: 60})
    model.cache.commit(model.cache.plan(np.zeros(70, np.int32), np.arange(60, 130, dtype=np.int32)))
    model.append({0: 2})
    model.check()


def test_an_export_has_pieces_of_a_limited_size(monkeypatch):
    model = Model(n_ctx=200, n_seq_max=2)
    model.append({0: 70})
    whole, n_pieces = b"".join(model.cache.export(0, 70)), []
    for piece_bytes in (1, 300, 1 << 20):
        monkeypatch.setattr("slm_native.kv.stores.PIECE_BYTES", piece_bytes)
        pieces = list(model.cache.export(0, 70))
        assert b"".join(pieces) == whole
        n_pieces.append(len(pieces))
    assert n_pieces == [4 * 70, 2 * 24 + 2 * 6, 4], "one token, 3 of 96 or 12 of 24 bytes, or all 70 at a time"


def test_pages_of_one_sequence_are_contiguous_if_possible():
    model = Model(n_ctx=640, n_seq_max=2)
    for _ in range(5):
        model.append({0: 100})
    assert model.cache.tables[0] == tuple(range(8))
    plan = model.cache.plan(np.zeros(1, np.int32), np.array([500], np.int32))
    assert plan.runs[0].pages == slice(0, 8)


@pytest.mark.parametrize("kv_type", ["q8_0", "bf16"])
def test_a_codec_rounds_as_ggml_does(kv_type):
    x = np.random.default_rng(0).standard_normal((7, 3, 64)).astype(np.float32) * 10
    x[2, 1] = 0
    np.testing.assert_array_equal(encode_and_decode(kv_type, x), round_by_ggml(kv_type, x))


@pytest.mark.parametrize(("kv_type", "steps"), [("q5_0", 16), ("q4_0", 8)])
def test_a_codec_of_few_bits_rounds_as_ggml_does(kv_type, steps):
    """A value close to the middle between two codes may get either code."""
    x = np.random.default_rng(0).standard_normal((70, 3, 64)).astype(np.float32) * 10
    x[2, 1] = 0
    actual, expected = encode_and_decode(kv_type, x), round_by_ggml(kv_type, x)
    blocks = x.reshape(-1, 32)
    step = np.repeat(np.abs(blocks).max(axis=1) / steps, 32).reshape(x.shape)
    differs = actual != expected
    is_near_middle = np.abs(np.abs(actual - x) - step / 2) < 1e-3 * step
    assert (~differs | is_near_middle).all()
    assert differs.mean() < 1e-3
    assert len(np.unique(actual[5, 0, :32])) > steps


def test_six_bits_round_to_the_nearest_of_64_steps():
    """Q6_0 of ik_llama.cpp: the number of largest magnitude is -32 steps, and the most in its other direction is 31."""
    x = np.random.default_rng(0).standard_normal((70, 3, 64)).astype(np.float32) * 10
    x[2, 1] = 0
    blocks, decoded = x.reshape(-1, 32), encode_and_decode("q6_0", x).reshape(-1, 32)
    extremes = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)]
    step = (extremes / -32).astype(np.float16).astype(np.float32)[:, None]
    codes = np.divide(decoded, step, out=np.zeros_like(decoded), where=step != 0)
    np.testing.assert_array_equal(codes, np.rint(codes))
    assert (codes.min(), codes.max()) == (-32, 31)
    # The scale is rounded to 11 bits, which moves 32 steps by 1/128 of a step.
    exact = np.divide(blocks, step, out=np.zeros_like(blocks), where=step != 0)
    assert (np.abs(codes - exact)[exact < 31] <= 0.5 + 1 / 64).all()
    assert (codes[exact >= 31] == 31).all()


def encode_and_decode(kv_type, x):
    codec = codec_of(kv_type, x.shape[-1])
    return codec.decode(codec.encode(x))


def round_by_ggml(kv_type, x):
    quantization = gguf.GGMLQuantizationType[kv_type.upper()]
    packed = gguf.quants.quantize(x.reshape(-1, x.shape[-1]), quantization)
    return gguf.quants.dequantize(packed, quantization).reshape(x.shape)


def test_bf16_rounds_to_even_and_saturates():
    codec = codec_of(KvType.BF16, 5)
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -np.inf, np.nan], np.float32)
    largest = (2 - 2.0**-7) * 2.0**127
    np.testing.assert_array_equal(
        codec.decode(codec.encode(x)), np.float32([1, 1 + 2.0**-6, largest, -largest, np.nan])
    )


def test_e4m3_keeps_its_numbers_and_rounds_others_to_the_nearest():
    """By the formula of OFP8: for every exponent, numbers between two neighbours and their exact middle."""
    levels = [m / 8 * 2.0**-6 for m in range(8)]
    levels += [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
    levels = np.array(levels, np.float32)
    assert levels.max() == 448
    codec = codec_of(KvType.F8_E4M3, 1)
    for sign in (1, -1):
        x = sign * levels
        np.testing.assert_array_equal(codec.encode(x)[0], np.arange(127) + (sign < 0) * 128)
        np.testing.assert_array_equal(codec.decode(codec.encode(x)), x)
    low, high = levels[:-1], levels[1:]
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    for x, expected in ((0.6 * low + 0.4 * high, low), (0.4 * low + 0.6 * high, high), ((low + high) / 2, even)):
        np.testing.assert_array_equal(codec.decode(codec.encode(x.astype(np.float32))), expected)
    special = np.array([449, 1e30, np.inf, -np.inf, np.nan, 1e-30, -0.0], np.float32)
    np.testing.assert_array_equal(codec.decode(codec.encode(special)), np.float32([448, 448, 448, -448, np.nan, 0, 0]))


def test_f16_rounds_to_nearest_and_saturates():
    codec = codec_of(KvType.F16, 4)
    x = np.array([[1.0005, -3e-8, 1e6, -70000.0]], np.float32)
    expected = np.array([[np.float32(np.float16(1.0005)), np.float32(np.float16(-3e-8)), 65504, -65504]], np.float32)
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), expected)


@pytest.mark.parametrize(
    ("kv_type", "largest", "too_large"),
    [
        ("f32", [1e12, -1e12, 0], [np.nextafter(np.float32(1e12), np.float32(2e12)), -np.inf, np.nan]),
        ("bf16", [9.9e11, -9.9e11, 0], [1.01e12, -1.01e12, np.nan]),
        ("f16", [65504, -65504, 0], [np.nan]),
        ("f8_e4m3", [448, -448, 0], [np.nan]),
    ],
)
def test_numbers_that_no_model_computes_are_not_bounded(kv_type, largest, too_large):
    codec = codec_of(kv_type, 1)
    assert codec.is_bounded(codec.encode(np.array(largest, np.float32)))
    for number in too_large:
        assert not codec.is_bounded(codec.encode(np.array([0, number, 0], np.float32)))


@pytest.mark.parametrize("kv_type", ["q8_0", "q6_0", "q5_0", "q4_0"])
def test_scales_of_blocks_are_bounded_if_they_are_finite(kv_type):
    codec = codec_of(kv_type, 32)
    planes = [np.array(plane) for plane in codec.encode(np.full((2, 32), 3e6, np.float32))]
    assert codec.is_bounded(planes)
    for scale in (np.inf, -np.inf, np.nan):
        planes[1][1] = scale
        assert not codec.is_bounded(planes)


@pytest.mark.parametrize("kv_type", KvType)
def test_reads_are_contiguous_for_any_number_of_heads_and_pages(kv_type):
    for n_kv_heads, n_tokens in ((1, 10), (1, 100), (2, 64), (3, 130)):
        codec = codec_of(kv_type, 32)
        page_layout = PageLayout(range(1), n_kv_heads, 32, codec, codec)
        cache = PagedKvCache([page_layout], 4, 1)
        plan = cache.plan(np.zeros(n_tokens, np.int32), np.arange(n_tokens, dtype=np.int32))
        x = np.random.default_rng(n_tokens).standard_normal((n_tokens, n_kv_heads, 32)).astype(np.float32)
        cache.layers[0].write(plan.pages, plan.slots, x, -x)
        for actual, expected in (
            (cache.layers[0].keys(plan.runs[0].pages, n_tokens), codec.decode(codec.encode(x))),
            (cache.layers[0].values(plan.runs[0].pages, n_tokens), codec.decode(codec.encode(-x))),
        ):
            assert (actual.dtype, actual.flags.c_contiguous) == (np.float32, True)
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "message"),
    [
        ("q3", 32, r"unknown KV type 'q3' \(accepted: f32, f16, bf16, q8_0, q6_0, q5_0, q4_0, f8_e4m3\)"),
        ("q8_0", 48, r"multiple of 32, this model's is 48 \(accepted: f32, f16, bf16, f8_e4m3\)"),
        (KvType.Q4_0, 48, r"multiple of 32, this model's is 48 \(accepted: f32, f16, bf16, f8_e4m3\)"),
    ],
)
def test_unsupported_kv_types_are_refused(kv_type, head_dim, message):
    with pytest.raises(InvalidOption, match=message):
        codec_of(kv_type, head_dim)


def test_a_cache_larger_than_memory_is_refused():
    with pytest.raises(InvalidOption, match="more than this machine can reserve"):
        PagedKvCache([layout(n_layers=1000, n_kv_heads=1000, head_dim=1024)], 1 << 40, 1)
