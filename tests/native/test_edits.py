"""Edits of native contexts against the float64 reference, which stores keys before RoPE and rotates them on use."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.tolerance import Precision, Tolerance
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidSnapshot
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, Pos

FLOAT32 = 1e-4  # clause 9 of the contract, relative
N = 200  # tokens: three full pages and a partial page


@pytest.fixture(params=SHAPES)
def tiny(request):
    return make_tiny_model(request.param, seed=11)


@pytest.fixture
def open_context(tmp_path, load, tiny):
    model = load(tiny.write(tmp_path / "m.gguf"))

    def open_with(**options):
        return model.new_context(ContextOptions(**{"n_ctx": 1024, "n_seq_max": 4, **options}))

    return open_with


CUTS = {
    "at the head": (0, 5),
    "one token": (10, 11),
    "a page": (64, 128),
    "across pages": (60, 131),
    "all but the last": (0, N - 1),
    "the tail": (150, N),
    "all": (0, N),
    "nothing": (77, 77),
}


@pytest.mark.parametrize("cut_range", CUTS.values(), ids=CUTS.keys())
def test_a_cut_equals_the_reference(tiny, open_context, feed, random_tokens, assert_close, cut_range):
    reference, tokens, more = Reference(Weights.of(tiny)), random_tokens(N), random_tokens(70, seed=1)
    reference.decode(tokens)
    reference.cut(*cut_range)
    context = open_context()
    feed(context, tokens)
    end = context.cut(Pos(0, cut_range[0]), Pos(0, cut_range[1]))
    assert end == Pos(0, N - (cut_range[1] - cut_range[0]))
    assert_close(feed(context, more), reference.decode(more), FLOAT32)


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.Q8_0])
def test_cuts_of_rounded_keys_stay_within_the_rounding_bound(
    tmp_path, load, feed, random_tokens, assert_close, kv_type
):
    tiny = make_tiny_model("llama", seed=12)
    weights = Weights.of(tiny)
    reference, tokens, more = Reference(weights), random_tokens(N), random_tokens(30, seed=1)
    options = ContextOptions(n_ctx=512, kv_type_k=kv_type, kv_type_v=kv_type)
    context = load(tiny.write(tmp_path / "m.gguf")).new_context(options)
    feed(context, tokens)
    reference.decode(tokens)
    for start, end in ((3, 20), (100, 101), (0, 64)):
        context.cut(Pos(0, start), Pos(0, end))
        reference.cut(start, end)
    # Each of three cuts rounds the keys again: four independent roundings add up to twice the error of one.
    bound = 2 * Tolerance(weights, Precision.FLOAT32, kv_type).row
    assert_close(feed(context, more), reference.decode(more), bound)


@pytest.mark.parametrize("kv_type_k", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("kv_type_v", ["f32", "f16", "q8_0"])
def test_keys_and_values_may_have_different_types(
    tmp_path, load, feed, random_tokens, assert_close, kv_type_k, kv_type_v
):
    tiny = make_tiny_model("qwen3", seed=13)
    weights, tokens = Weights.of(tiny), random_tokens(100)
    options = ContextOptions(n_ctx=128, kv_type_k=kv_type_k, kv_type_v=kv_type_v)
    with load(tiny.write(tmp_path / "m.gguf")).new_context(options) as context:
        actual = feed(context, tokens)
    bounds = [Tolerance(weights, Precision.FLOAT32, KvType(kind)).row for kind in (kv_type_k, kv_type_v)]
    error = assert_close(actual, Reference(weights).decode(tokens), max(bounds))
    exact = kv_type_k == kv_type_v == "f32"
    assert exact == (error < 2**-14), f"error {error:.1e}: float16 and int8 err by more than 2**-14, float32 by less"


def test_truncate_then_replay_equals_never_having_decoded_the_tail(
    tiny, open_context, feed, random_tokens, assert_close
):
    tokens, more = random_tokens(N), random_tokens(80, seed=1)
    for length in (0, 1, 63, 64, 65, N - 1, N):
        context = open_context()
        feed(context, tokens)
        context.truncate(Pos(0, length))
        expected = Reference(Weights.of(tiny)).decode([*tokens[:length], *more])[length:]
        assert_close(feed(context, more), expected, FLOAT32)
        context.close()


def test_edits_of_a_fork_do_not_change_the_others(tiny, open_context, feed, random_tokens, assert_close):
    reference, context, tokens = Reference(Weights.of(tiny)), open_context(), random_tokens(N)
    feed(context, tokens)
    reference.decode(tokens)
    for dst, end in ((1, N), (2, 100), (3, 64)):
        context.fork(0, dst, end)
        reference.fork(0, dst, end)
    assert context.n_free == context.n_ctx - N, "a fork takes no positions"
    context.cut(Pos(1, 10), Pos(1, 90))
    reference.cut(10, 90, 1)
    context.truncate(Pos(0, 70))
    reference.truncate(70, 0)
    for seq_id in (2, 0, 3, 1):  # each sequence in turn writes to pages that others share
        more = random_tokens(75, seed=seq_id)
        assert_close(feed(context, more, seq_id), reference.decode(more, seq_id), FLOAT32)
    context.drop(0)
    for seq_id in (1, 2, 3):
        more = random_tokens(3, seed=9)
        assert_close(feed(context, more, seq_id), reference.decode(more, seq_id), FLOAT32)


def test_sequences_that_share_a_page_may_write_in_one_batch(tiny, open_context, feed, random_tokens, assert_close):
    reference, context, tokens = Reference(Weights.of(tiny)), open_context(), random_tokens(70)
    feed(context, tokens)
    reference.decode(tokens)
    for dst, end in ((1, 70), (2, 67)):
        context.fork(0, dst, end)
        reference.fork(0, dst, end)
    batch = context.new_batch()
    for seq_id in (0, 1, 2):
        batch.add(20 + seq_id, Pos(seq_id, context.length(seq_id)), logits=True)
    expected = np.concatenate([reference.decode([20 + seq_id], seq_id) for seq_id in (0, 1, 2)])
    assert_close(context.decode(batch), expected, FLOAT32)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_a_restored_dump_continues_bit_for_bit(tmp_path, load, feed, random_tokens, kv_type):
    model = load(make_tiny_model("qwen3").write(tmp_path / "m.gguf"))
    options = ContextOptions(n_ctx=512, n_seq_max=3, kv_type_k=KvType(kv_type), kv_type_v=KvType(kv_type))
    context, other = model.new_context(options), model.new_context(options)
    feed(context, random_tokens(N))
    context.cut(Pos(0, 20), Pos(0, 50))
    data = context.dump(0)
    feed(other, random_tokens(10, seed=5), seq_id=2)
    assert other.restore(2, data) == Pos(2, N - 30)
    assert other.tokens(2) == context.tokens(0)
    more = random_tokens(5, seed=6)
    np.testing.assert_array_equal(feed(other, more, seq_id=2), feed(context, more))


def test_a_dump_with_other_kv_types_is_replayed(tiny, open_context, feed, random_tokens, assert_close):
    context, other = open_context(), open_context(kv_type_k=KvType.F16)
    feed(context, random_tokens(N))
    context.cut(Pos(0, 20), Pos(0, 50))
    other.restore(0, context.dump(0))
    more = random_tokens(5, seed=6)
    bound = Tolerance(Weights.of(tiny), Precision.FLOAT32, KvType.F16).row
    assert_close(feed(other, more), feed(context, more), bound)


def with_payload(data: bytes, change) -> bytes:
    snapshot = SequenceSnapshot.from_bytes(data)
    fields = {name: getattr(snapshot, name) for name in SequenceSnapshot.__slots__}
    return SequenceSnapshot(**{**fields, "payload": change(snapshot.payload)}).to_bytes()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (lambda p: p[:-1], "the KV payload has .* bytes, 66 tokens take"),
        (lambda p: p + bytes(4), "the KV payload has .* bytes"),
        (lambda p: p[:4], "the KV payload has 4 bytes"),
        (lambda p: np.float32(np.nan).tobytes() + p[4:], "a number that no model computes"),
        (lambda p: p[:-4] + np.float32(np.inf).tobytes(), "a number that no model computes"),
    ],
)
def test_a_hostile_payload_is_refused_and_changes_nothing(open_context, feed, random_tokens, payload, message):
    context = open_context()
    feed(context, random_tokens(66))
    data = context.dump(0)
    context.cut(Pos(0, 3), Pos(0, 5))
    feed(context, random_tokens(2))
    before = context.dump(0)
    with pytest.raises(InvalidSnapshot, match=message):
        context.restore(0, with_payload(data, payload))
    assert context.dump(0) == before


def test_declared_edit_level_and_capabilities(open_context, tiny):
    context = open_context()
    assert context.edit_level is EditLevel.CUT
    outputs_and_inputs = {Capability.EMBEDDINGS, Capability.EMBEDDING_INPUT, Capability.BIDIRECTIONAL_BLOCKS}
    outputs_and_inputs |= {Capability.LAYER_STATES, Capability.ATTENTION_BIAS}
    outputs_and_inputs |= {Capability.MROPE_POSITIONS} if tiny.shape.sections else set()
    always = {Capability.SHARED_FORK, Capability.KV_PAYLOAD, Capability.ADAPTERS}
    assert context.capabilities == always | outputs_and_inputs
