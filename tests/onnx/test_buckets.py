"""Batches padded to powers of two; the oracle is the same batches without padding."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.broken import with_broken_token
from slm_conformance.oracle.families import family_model
from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.types import ContextOptions, KvType, Pos
from slm_onnx.feeding import bucket, padded, spare_cells

FLOAT32 = 1e-5  # relative; matrices with more rows sum in another order


def run_session(model, feed, tokens):
    """Logits of a session: batches of odd sizes, a batch of several sequences, edits, and the last free cell."""
    context = model.new_context(ContextOptions(n_ctx=301, n_seq_max=3, n_batch=90))
    rows = [feed(context, tokens[:70]), feed(context, tokens[70:75], 1)]
    context.fork(0, 2, 33)
    batch = context.new_batch()
    for seq_id in (2, 0, 1):
        start = context.length(seq_id)
        batch.extend(tokens[start : start + 3 + seq_id], Pos(seq_id, start), logits="last")
    rows.append(context.decode(batch).copy())
    context.cut(Pos(0, 20), Pos(0, 41))
    context.restore(1, context.dump(0))
    rows += [feed(context, tokens[75:86], seq_id) for seq_id in (0, 1)]
    context.drop(1)
    while context.n_free > 1:
        rows.append(feed(context, tokens[: min(90, context.n_free - 1)], 2))
    rows.append(feed(context, tokens[:1], 2))
    assert context.n_free == 0
    return rows, context


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "bloom", "gpt2", "mistral3"])
def test_logits_equal_those_without_padding(tmp_path, load, feed, random_tokens, assert_close, family) -> None:
    path, tokens = family_model(tmp_path, family), random_tokens(90)
    if family == "gpt2":
        tokens = tokens[:60]  # no RoPE: gpt2 cannot be cut
        exact, fixed = (load(path, buckets=buckets).new_context(ContextOptions(n_ctx=60)) for buckets in (False, True))
        for length in (37, 20, 1, 2):
            part, tokens = tokens[:length], tokens[length:]
            assert_close(feed(fixed, part), feed(exact, part), FLOAT32)
        return
    expected_rows, _ = run_session(load(path), feed, tokens)
    actual_rows, _ = run_session(load(path, buckets=True), feed, tokens)
    for actual, expected in zip(actual_rows, expected_rows, strict=True):
        assert_close(actual, expected, FLOAT32)


def test_few_shapes_occur_and_each_reuses_its_buffers(tmp_path, load, feed, random_tokens) -> None:
    context = load(family_model(tmp_path, "qwen3"), buckets=True).new_context(ContextOptions(n_ctx=600))
    for length in (5, 7, 8, *[1] * 300):
        feed(context, random_tokens(length))
    shapes = context._decoders.feed._bound
    assert sorted((s.inputs["rows"].shape()[1], s.inputs["attention_bias.0"].shape()[3]) for s in shapes.values()) == [
        (1, 256),
        (1, 512),
        (8, 256),
    ]
    one = next(s for s in shapes.values() if s.inputs["rows"].shape()[1] == 1)
    before = {name: value.data_ptr() for name, value in one.inputs.items()}
    feed(context, random_tokens(1))
    assert {name: value.data_ptr() for name, value in one.inputs.items()} == before
    assert len({s.number for s in shapes.values()}) == 3


def test_shapes_of_two_contexts_have_different_numbers(tmp_path, load, feed, random_tokens) -> None:
    """A captured run reads and writes the KV cache of its own context."""
    model = load(family_model(tmp_path, "qwen3"), buckets=True)
    contexts = [model.new_context(ContextOptions(n_ctx=64)) for _ in range(2)]
    for context in contexts:
        feed(context, random_tokens(3))
    numbers = [shape.number for context in contexts for shape in context._decoders.feed._bound.values()]
    assert len(set(numbers)) == 2


def test_capture_without_buckets_is_refused(tmp_path, load) -> None:
    with pytest.raises(InvalidOption, match="buckets=True"):
        load(family_model(tmp_path, "qwen3"), provider_options={"enable_cuda_graph": "1"})


def test_buckets_are_the_next_powers_of_two() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 512)] == [1, 2, 4, 4, 8, 8, 16, 512]
    assert max(bucket(n) - n for n in range(1, 91)) <= spare_cells(90)
    assert padded(np.array([3, 4]), 4).tolist() == [3, 4, 4, 4]


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.Q8_0])
def test_nan_of_a_failed_call_is_not_read_as_padding(tmp_path, load, feed, assert_close, kv_type) -> None:
    path = family_model(tmp_path, "qwen3")
    options = ContextOptions(n_ctx=64, kv_type_k=kv_type, kv_type_v=kv_type)
    sound = load(path, buckets=True).new_context(options)
    broken = load(with_broken_token(path, 5, tmp_path / "broken.gguf"), buckets=True).new_context(options)
    feed(sound, [1, 2, 3]), feed(broken, [1, 2, 3])
    with pytest.raises(DecodeFailed, match="sequence 0: the model computed NaN"):
        feed(broken, [4, 5, 6, 7, 8, 9])
    assert_close(feed(broken, [4]), feed(sound, [4]), FLOAT32)
