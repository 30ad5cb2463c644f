"""Attention of the C++ kernels, on every instruction set of this machine, against softmaxes in float64.

The oracle reads keys and values that the codec encoded and decoded. Bounds are those of float32: a score is a sum of D
products, a weight is an exponential, the result is a mean of S values. Each operation errs by half a unit in the last
place.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from slm_core.architectures import alibi_slopes
from slm_core.types import KvType
from slm_native import _extension
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.parameters import PLAIN, Scoring
from slm_native.kv import PAGE_TOKENS, BatchPlan, PagedKvCache, PageLayout, codec_of, in_blocks

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

native = _extension.load()
ISAS = native.available_isas()
U = 2.0**-24
SPLIT = 2.0**-14  # what a matrix unit loses of a product of numbers that are split into two bf16; attention_tiles.inc
FEW_ROWS = 8  # keys are not dequantized for at most 8 rows (queries x heads) of a sequence, nor for one token
BLOCK = 32
CODED = (KvType.Q8_0, KvType.Q6_0, KvType.Q5_0, KvType.Q4_0)
TYPES = (KvType.F32, KvType.F16, KvType.BF16, *CODED)


def f32(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@dataclass
class Heads:
    """A shape: K key/value heads of width D, each shared by ``group`` query heads."""

    n_kv: int
    group: int
    width: int


class CacheWithCopy:
    """A KV cache of one kernel set, and a copy of the keys and values of each sequence."""

    def __init__(self, isa: str, heads: Heads, k_type: str, v_type: str, n_threads: int = 2, n_ctx: int = 1024) -> None:
        self.heads = heads
        self.has_tiles = isa.startswith("amx") and KvType.F32 not in (k_type, v_type)
        self.kernels = CpuKernels(isa, n_threads, 0)
        self.codecs = codec_of(k_type, heads.width), codec_of(v_type, heads.width)
        # The tests use the second of three layers: a wrong offset would read another layer.
        layout = PageLayout(range(3), heads.n_kv, heads.width, *self.codecs)
        self.cache = PagedKvCache([layout], PagedKvCache.n_pages_for(n_ctx, 4), 4, self.kernels.new_pages)
        self.layer = self.cache.layers[1]
        self.held: dict[int, list[NDArray[np.float32]]] = {}

    def append(self, counts: dict[int, int], seed: int, shuffled: bool = False) -> BatchPlan:
        """Append ``counts[seq_id]`` tokens to each sequence; ``shuffled`` mixes the tokens of the sequences."""
        seq_ids = np.concatenate([np.full(n, seq_id, np.int32) for seq_id, n in counts.items()])
        if shuffled:
            np.random.default_rng(seed).shuffle(seq_ids)
        positions = np.zeros(len(seq_ids), np.int32)
        for seq_id, n in counts.items():
            start = len(self.held[seq_id][0]) if seq_id in self.held else 0
            positions[seq_ids == seq_id] = np.arange(start, start + n)
        k = f32(len(seq_ids), self.heads.n_kv, self.heads.width, seed=seed)
        v = f32(len(seq_ids), self.heads.n_kv, self.heads.width, seed=seed + 1)
        plan = self.kernels.place(self.cache.plan(seq_ids, positions))
        self.layer.write(plan.pages, plan.slots, k, v)
        self.cache.commit(plan)
        for seq_id in counts:
            appended = [
                codec.decode(codec.encode(x[seq_ids == seq_id])) for codec, x in zip(self.codecs, (k, v), strict=True)
            ]
            before = self.held.get(seq_id)
            self.held[seq_id] = (
                appended if before is None else [np.concatenate(both) for both in zip(before, appended, strict=True)]
            )
        return plan

    def fork(self, src: int, dst: int, end: int) -> None:
        self.cache.fork(src, dst, end)
        self.held[dst] = [x[:end] for x in self.held[src]]

    def queries(self, n_tokens: int, seed: int) -> NDArray[np.float32]:
        return f32(n_tokens, self.heads.n_kv * self.heads.group, self.heads.width, seed=seed)

    def check(self, plan: BatchPlan, seed: int, scoring: Scoring = PLAIN) -> None:
        """Compare the attention of a batch with the oracle, run by run."""
        q = self.queries(len(plan.pages), seed)
        scale = self.heads.width**-0.5
        actual = self.kernels.attention_over_runs(q, self.layer, plan, scale, scoring)
        assert (actual.shape, actual.dtype) == (q.shape, np.float32)
        for run in plan.runs:
            k, v = (stored[: run.n_held] for stored in self.held[run.seq_id])
            assert len(k) == run.n_held
            queries = q[run.rows] * np.float32(scale)
            is_few = len(queries) == 1 or len(queries) * self.heads.group <= FEW_ROWS
            if self.codecs[0].kv_type in CODED and is_few:
                queries = rounded_to_int8(queries)
            lost = SPLIT if self.has_tiles and not is_few else 0.0
            expected, bound = attention(queries, k, v, scoring, bidirectional=run.bidirectional, lost=lost)
            worst = np.max(np.abs(actual[run.rows] - expected) / bound)
            assert worst <= 1, f"sequence {run.seq_id} is off by {worst:.3g} times the bound"


def rounded_to_int8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Activations rounded to int8 in blocks of 32 with one scale."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    peaks = np.abs(blocks).max(axis=-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / peaks))
    return (codes.astype(np.float64) * (peaks / np.float32(127)).astype(np.float64)).reshape(x.shape)


def attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], scoring: Scoring, *, bidirectional: bool, lost: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """As ``attention_of_each_query``, computed once for the instruction sets that a test goes through."""
    key = hash((*(part.tobytes() for part in (q, k, v)), q.shape, k.shape, repr(scoring), bidirectional, lost))
    if key not in _computed:
        if len(_computed) > 64:  # more than a test needs
            _computed.clear()
        _computed[key] = attention_of_each_query(q, k, v, scoring, bidirectional=bidirectional, lost=lost)
    return _computed[key]


_computed: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}


def attention_of_each_query(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], scoring: Scoring, *, bidirectional: bool, lost: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The mean of values and its error bound, in float64, one query and head at a time; ``q`` is already scaled."""
    n_tokens, n_heads, _ = q.shape
    n_held, n_kv_heads, _ = k.shape
    expected, bound = np.empty(q.shape), np.empty(q.shape)
    for t in range(n_tokens):
        position = n_held - n_tokens + t
        first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
        visible = np.arange(min(first, n_held - n_tokens), n_held) if bidirectional else np.arange(first, position + 1)
        for h in range(n_heads):
            keys, values = k[visible, h // (n_heads // n_kv_heads)], v[visible, h // (n_heads // n_kv_heads)]
            expected[t, h], bound[t, h] = mean_of_values(q[t, h], keys, values, position - visible, scoring, h, lost)
    return expected, bound


def mean_of_values(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    distance: NDArray[Any],
    scoring: Scoring,
    head: int,
    lost: float,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The result of one query, and the error bound of a float32 computation that loses ``lost`` of each product.

    The relative error of a weight is the absolute error of its score plus the error of an exponential: eight units, two
    for each unit of the argument (which is rounded, and multiplied by a rounded log2(e)). Each page adds this error
    once more, because a larger score rescales the sums. A capped score has a relative error of eight units.
    """
    q, keys, values = q.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    scores = keys @ q
    error = ((len(q) + 2) * U + lost) * (np.abs(keys) @ np.abs(q))
    if scoring.softcap is not None:
        scores = np.tanh(scores / scoring.softcap) * scoring.softcap
        error += 8 * U * np.abs(scores)
    if scoring.slopes is not None:
        scores = scores - float(scoring.slopes[head]) * distance
        error += 2 * U * (np.abs(scores) + float(scoring.slopes[head]) * distance)
    sinks = [] if scoring.sinks is None else [float(scoring.sinks[head])]
    depth = np.max([*scores, *sinks]) - scores
    weights = np.exp(-depth)
    total = weights.sum() + sum(np.exp(sink - np.max([*scores, *sinks])) for sink in sinks)
    n_pages = len(scores) / PAGE_TOKENS + 2
    share = weights / total
    relative = error + U * (8 + 2 * depth) * n_pages + U * (len(scores) + 4)
    expected = share @ values
    bound = (share * (relative + lost)) @ np.abs(values) + np.abs(expected) * (share @ relative + 8 * U)
    return expected, 1.1 * bound + 2.0**-120  # one tenth more for products of errors


SHAPES = {
    "one token, narrow": (Heads(1, 1, 8), 1, 1),
    "one token": (Heads(2, 2, 64), 1, 70),
    "one token, group of 7": (Heads(1, 7, 80), 1, 300),
    "one token, group of 20": (Heads(1, 20, 32), 1, 65),
    "few tokens": (Heads(2, 2, 128), 3, 130),
    "width of 24": (Heads(8, 1, 24), 5, 64),
    "width of 96": (Heads(2, 3, 96), 2, 200),
    "width of 7": (Heads(2, 5, 7), 4, 67),
    "prompt": (Heads(2, 3, 128), 70, 70),
    "prompt after others": (Heads(1, 1, 64), 70, 290),
    "prompt, width of 8": (Heads(3, 4, 8), 33, 100),
    "prompt, group of 5": (Heads(1, 5, 80), 23, 150),
}
SCORINGS = {
    "plain": lambda n_heads: PLAIN,
    "window": lambda n_heads: Scoring(window=33),
    "window of one": lambda n_heads: Scoring(window=1),
    "softcap": lambda n_heads: Scoring(softcap=3.0),
    "large softcap": lambda n_heads: Scoring(softcap=1e6),
    "alibi": lambda n_heads: Scoring(slopes=alibi_slopes(n_heads, 8.0)),
    "sinks": lambda n_heads: Scoring(sinks=2 * f32(n_heads, seed=8)),
    "all": lambda n_heads: Scoring(100, 5.0, alibi_slopes(n_heads, 8.0), f32(n_heads, seed=8)),
}


def usable(kv_type: str, width: int) -> bool:
    return kv_type not in CODED or width % BLOCK == 0


@every_isa
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scoring_and_shapes(isa: str, shape: str, scoring: str) -> None:
    heads, n_tokens, n_held = SHAPES[shape]
    cached = CacheWithCopy(isa, heads, "f32", "f16")
    if n_held > n_tokens:
        cached.append({0: n_held - n_tokens}, seed=1)
    plan = cached.append({0: n_tokens}, seed=3)
    cached.check(plan, 5, SCORINGS[scoring](heads.n_kv * heads.group))


@every_isa
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_type", TYPES)
def test_each_kv_type(isa: str, kv_type: KvType, shape: str) -> None:
    heads, n_tokens, n_held = SHAPES[shape]
    if not usable(kv_type, heads.width):
        heads = Heads(heads.n_kv, heads.group, -(-heads.width // BLOCK) * BLOCK)
    cached = CacheWithCopy(isa, heads, kv_type, kv_type)
    if n_held > n_tokens:
        cached.append({0: n_held - n_tokens}, seed=1)
    plan = cached.append({0: n_tokens}, seed=3)
    cached.check(plan, 5)
    cached.check(plan, 6, SCORINGS["all"](heads.n_kv * heads.group))


@every_isa
@pytest.mark.parametrize("k_type", TYPES)
@pytest.mark.parametrize("v_type", TYPES)
def test_keys_and_values_of_different_types(isa: str, k_type: KvType, v_type: KvType) -> None:
    cached = CacheWithCopy(isa, Heads(2, 2, 32), k_type, v_type)
    cached.check(cached.append({0: 67}, seed=1), 3)
    cached.check(cached.append({0: 2}, seed=4), 5)


@every_isa
@pytest.mark.parametrize("n_tokens", [*range(1, 20), 31, 32, 33, 47, 48, 49, 63, 64, 65])
def test_every_number_of_tokens(isa: str, n_tokens: int) -> None:
    cached = CacheWithCopy(isa, Heads(1, 3, 40), "f16", "f32")
    cached.append({0: 61}, seed=1)
    cached.check(cached.append({0: n_tokens}, seed=3), 5, Scoring(window=50))


@every_isa
@pytest.mark.parametrize("window", [None, 1, 20, 64, 200])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 3), (3, 70, 5, 130), (300,), (40, 100, 64)], ids=str)
def test_bidirectional_blocks(isa: str, lengths: tuple[int, ...], window: int | None) -> None:
    """Every second run of a batch is a bidirectional block, at any offset in a page."""
    for kv_type in ("f32", "q8_0"):
        cached = CacheWithCopy(isa, Heads(2, 3, BLOCK), kv_type, kv_type)
        cached.append({0: 77}, seed=1)
        plan = cached.append({0: sum(lengths)}, seed=3)
        runs = [np.arange(n - 1, -1, -1) * (i % 2 == len(lengths) % 2) for i, n in enumerate(lengths, 1)]
        blocked = in_blocks(plan, np.concatenate(runs).astype(np.int32))
        assert sum(run.bidirectional for run in blocked.runs) == sum(bool(run.any()) for run in runs)
        cached.check(cached.kernels.place(blocked), seed=5, scoring=Scoring(window=window))


@every_isa
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_sequences_that_share_pages(isa: str, kv_type: str, n_threads: int) -> None:
    """Tokens of four sequences in any order: forks at a page boundary and inside a page, an independent sequence."""
    cached = CacheWithCopy(isa, Heads(2, 2, 64), kv_type, kv_type, n_threads)
    cached.append({0: 200}, seed=1)
    cached.fork(0, 1, 128)
    cached.fork(0, 2, 77)
    plan = cached.append({0: 1, 1: 3, 2: 40, 3: 9}, seed=3, shuffled=True)
    assert len({run.n_held for run in plan.runs}) == 4
    for scoring in ("plain", "all"):
        cached.check(plan, 5, SCORINGS[scoring](4))


@every_isa
@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_long_contexts_are_split_into_parts(isa: str, n_kv_heads: int) -> None:
    cached = CacheWithCopy(isa, Heads(n_kv_heads, 2, 32), "f16", "q8_0", n_threads=4, n_ctx=4096)
    cached.append({0: 3000}, seed=1)
    plan = cached.append({0: 1}, seed=3)
    for scoring in ("plain", "sinks"):
        cached.check(plan, 5, SCORINGS[scoring](2 * n_kv_heads))
    cached.check(plan, 5, Scoring(window=1500))


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 100])
def test_the_result_is_bitwise_equal_for_any_number_of_threads(isa: str, n_tokens: int) -> None:
    results = []
    for n_threads in (1, 2, 3):
        cached = CacheWithCopy(isa, Heads(1, 2, 64), "f16", "f16", n_threads, n_ctx=4096)
        cached.append({0: 2500}, seed=1)
        plan = cached.append({0: n_tokens}, seed=3)
        results.append(cached.kernels.attention_over_runs(cached.queries(n_tokens, seed=5), cached.layer, plan, 0.125))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_large_scores(isa: str, n_tokens: int) -> None:
    """Only the key with the largest score counts: the other exponentials underflow, and none overflows."""
    cached = CacheWithCopy(isa, Heads(1, 2, 16), "f32", "f32")
    plan = cached.append({0: 150}, seed=1) if n_tokens > 1 else None
    plan = cached.append({0: n_tokens}, seed=3)
    q = cached.queries(n_tokens, seed=4) * np.float32(1e4)
    actual = cached.kernels.attention_over_runs(q, cached.layer, plan, 1.0)
    k, v = cached.held[0]
    for t in range(n_tokens):
        for h in range(2):
            end = len(k) - n_tokens + t + 1
            np.testing.assert_allclose(actual[t, h], v[np.argmax(k[:end, 0].astype(float) @ q[t, h]), 0], rtol=1e-6)


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_propagate(isa: str, n_tokens: int, bad: float) -> None:
    """Only the heads that read the value show it, from its page on: where the value is masked, its weight is 0."""
    cached = CacheWithCopy(isa, Heads(2, 2, 16), "f32", "f32")
    plan = cached.append({0: 90}, seed=1)
    k, v = f32(90, 2, 16, seed=1), f32(90, 2, 16, seed=2)
    v[70, 1, 3] = bad
    cached.layer.write(plan.pages, plan.slots, k, v)
    plan = plan if n_tokens > 1 else cached.append({0: 1}, seed=3)
    actual = cached.kernels.attention_over_runs(cached.queries(len(plan.pages), 5), cached.layer, plan, 0.25)
    expected = np.ones(actual.shape, bool)
    expected[70 if n_tokens > 1 else 0 :, 2:, 3] = False
    checked = np.delete(np.arange(len(actual)), np.arange(PAGE_TOKENS, 70) if n_tokens > 1 else [])
    np.testing.assert_array_equal(np.isfinite(actual)[checked], expected[checked])


@every_isa
def test_slots_after_the_last_token_are_not_read(isa: str) -> None:
    cached = CacheWithCopy(isa, Heads(1, 2, 16), "f32", "f32")
    cached.append({0: 70}, seed=1)
    for plane in (*cached.layer._key_planes, *cached.layer._value_planes):
        plane[1, :, 20:] = np.nan
    cached.check(cached.append({0: 1}, seed=3), 5)
    cached.check(cached.append({0: 11}, seed=6), 7)


@every_isa
@pytest.mark.parametrize("kv_type", TYPES)
def test_kernels_write_the_bits_of_the_codec(isa: str, kv_type: KvType) -> None:
    """Bit for bit, including the values that are hardest to round."""
    cached = CacheWithCopy(isa, Heads(3, 1, 96), kv_type, kv_type)
    x = f32(70, 3, 96, seed=1) * np.float32(10) ** np.random.default_rng(2).integers(-9, 9, (70, 3, 96))
    x = x.astype(np.float32)
    x[5], x[6, 1] = 0, -0.0
    x[7] = f32(3, 96, seed=4) * np.float32(1e-41)
    x[8] = np.arange(96, dtype=np.float32) - 48
    x[9] = np.float32(70000)
    x[10, :, ::7] = np.float32(-3.4e38)
    x[11] = np.float32(1) + np.arange(96, dtype=np.float32) * np.float32(2.0**-12)
    plan = cached.kernels.place(cached.cache.plan(np.zeros(70, np.int32), np.arange(70, dtype=np.int32)))
    cached.layer.write(plan.pages, plan.slots, x, -x)
    for planes, encoded in (
        (cached.layer._key_planes, cached.codecs[0].encode(x)),
        (cached.layer._value_planes, cached.codecs[1].encode(-x)),
    ):
        for plane, expected in zip(planes, encoded, strict=True):
            np.testing.assert_array_equal(plane[plan.pages, :, plan.slots], expected)


@every_isa
@pytest.mark.parametrize("kv_type", TYPES)
def test_nan_is_stored_as_nan(isa: str, kv_type: KvType) -> None:
    cached = CacheWithCopy(isa, Heads(1, 1, 64), kv_type, kv_type)
    plan = cached.append({0: 3}, seed=1)
    x = f32(3, 1, 64, seed=2)
    x[1, 0, 40] = np.nan
    cached.layer.write(plan.pages, plan.slots, x, x)
    stored = cached.layer.keys(slice(0, 1), 3)
    n_bad = BLOCK if kv_type in CODED else 1
    assert np.isnan(stored).sum() == n_bad
    assert np.isnan(stored[1, 0, 40])


@every_isa
def test_two_threads_may_attend_at_once(isa: str) -> None:
    cached = [CacheWithCopy(isa, Heads(2, 2, 32), "f16", "f16") for _ in range(2)]
    errors: list[BaseException] = []

    def attend(one: CacheWithCopy) -> None:
        try:
            for seed in range(10):
                one.check(one.append({0: 40}, seed=seed), seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=attend, args=(one,)) for one in cached]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@every_isa
def test_wrong_arguments_are_refused(isa: str) -> None:
    kernels = native.Kernels(isa, 1)
    pages = PageLayout(range(2), 3, 32, codec_of("f16", 32), codec_of("q8_0", 32)).pages(2)
    sizes = {"keys": "f16", "values": "q8_0", "n_layers": 2, "layer": 1, "n_kv_heads": 3, "head_dim": 32}
    for change, message in (
        ({"keys": "q3"}, "no kernel for KV type 'q3'"),
        ({"layer": 2}, "no such layer"),
        ({"head_dim": 16}, "no whole number of blocks"),
        ({"n_layers": 3}, "a page of these types and sizes has"),
    ):
        with pytest.raises(ValueError, match=message):
            native.CacheLayer.of(pages, **{**sizes, **change})
    layer = native.CacheLayer.of(pages, **sizes)

    def ints(*values: int) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    for tokens, n_held, runs, message in (
        (ints(0, 2), ints(0), (ints(2), ints(2)), "a token index is out of range"),
        (ints(0), ints(-1), (ints(1), ints(1)), "a page index is negative"),
        (ints(0), ints(0), (ints(1), ints(65)), "all tokens and pages exactly once"),
        (ints(0), ints(0), (ints(2), ints(1)), "a run is empty, or holds fewer"),
        (ints(0), ints(0), (ints(1, 1), ints(1)), "differ in length"),
    ):
        with pytest.raises(ValueError, match=message):
            native.Batch(tokens, n_held, *runs, np.zeros_like(runs[0]))
    batch, far = (native.Batch(ints(0), ints(page), ints(1), ints(1), ints(0)) for page in (1, 2))
    q = f32(1, 6, 32, seed=1)
    kernels.attend(q, layer, batch, 1.0, 0.0, 0, None, None)
    wrong: list[tuple[tuple[object, ...], type[Exception], str]] = [
        ((f32(1, 5, 32, seed=1), layer, batch, 1.0, 0.0, 0, None, None), ValueError, "multiple of 3"),
        ((f32(2, 6, 32, seed=1), layer, batch, 1.0, 0.0, 0, None, None), ValueError, "q must be"),
        ((q.astype(np.float64), layer, batch, 1.0, 0.0, 0, None, None), TypeError, "q must be float32"),
        ((q, layer, far, 1.0, 0.0, 0, None, None), ValueError, "a page is out of range"),
        ((q, layer, batch, 1.0, 0.0, -1, None, None), ValueError, "window"),
        ((q, layer, batch, 1.0, 0.0, 0, f32(5, seed=1), None), ValueError, "slopes has 5 numbers, not 6"),
        ((q, layer, batch, 1.0, 0.0, 0, None, f32(5, seed=1)), ValueError, "sinks has 5 numbers, not 6"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            kernels.attend(*arguments)
    k = f32(1, 3, 32, seed=1)
    for page, slot in ((2, 0), (-1, 0), (0, 64), (0, -1)):
        with pytest.raises(ValueError, match="a page or slot is out of range"):
            kernels.write(layer, np.array([page]), np.array([slot]), k, k)
    with pytest.raises(ValueError, match="v must be"):
        kernels.write(layer, np.array([0]), np.array([0]), k, k[:, :2].copy())
