"""Spans against transformers; and the decoder that they take, which is made for the first of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bidirectional_example import N, feed_blocks, transformers_logits
from native.architectures.engines import make_subject
from slm_conformance.oracle.families import family_model
from slm_conformance.suite.tolerance import relative_errors
from slm_core.errors import DecodeFailed, UnsupportedInput, UnsupportedModel
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_onnx import runtime
from slm_onnx.compiled import Compiler
from slm_onnx.decoder import DecoderGraph

FLOAT32 = 1e-4  # clause 9 of the contract, relative
SIZES = ContextOptions(n_ctx=512, n_seq_max=2, n_batch=256)
BYTES, F8 = (
    ContextOptions(n_ctx=512, n_seq_max=2, n_batch=256, kv_type_k=kv_type, kv_type_v=kv_type)
    for kv_type in (KvType.Q8_0, KvType.F8_E4M3)
)
SHARE = 0.25
"""Of the error of native's f8_e4m3; see ``test_bytecache``."""


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("family"), "gemma3")


@pytest.mark.parametrize("buckets", [False, True])
def test_bidirectional_blocks_equal_transformers(gemma3, load, random_tokens, assert_close, buckets) -> None:
    tokens = random_tokens(N)
    with load(gemma3.path, buckets=buckets).new_context(SIZES) as context:
        assert_close(feed_blocks(context, tokens), transformers_logits(gemma3.model, tokens), FLOAT32)


@pytest.mark.parametrize("family", ["gemma2", "phi3_window", "cohere2", "qwen3moe"])
def test_bidirectional_blocks_of_other_families_equal_the_native_engine(
    tmp_path, load, random_tokens, assert_close, family
) -> None:
    path, tokens = family_model(tmp_path, family), random_tokens(N)
    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "reference"})) as native:
        wanted = feed_blocks(native.new_context(SIZES), tokens)
    assert_close(feed_blocks(load(path).new_context(SIZES), tokens), wanted, FLOAT32)


def test_bidirectional_blocks_over_keys_and_values_in_bytes_are_near_transformers(gemma3, load, random_tokens) -> None:
    tokens = random_tokens(N)
    wanted = transformers_logits(gemma3.model, tokens)
    ours = relative_errors(feed_blocks(load(gemma3.path).new_context(BYTES), tokens), wanted)
    with NativeBackend().load(gemma3.path, ModelOptions(backend_options={"tier": "reference"})) as native:
        theirs = relative_errors(feed_blocks(native.new_context(F8), tokens), wanted)
    assert 0 < ours.mean() < SHARE * theirs.mean(), f"mean {ours.mean():.1e}, that of 3 bits is {theirs.mean():.1e}"


def decode_span(context) -> np.ndarray:
    """Three tokens at the end of a sequence that see each other."""
    batch = context.new_batch()
    batch.extend([5, 6, 7], Pos(0, context.length(0)), logits="all")
    batch.join_block(3)
    return context.decode(batch).copy()


@pytest.fixture
def built(monkeypatch) -> list[bool]:
    """Of each decoder that is built from now on, whether its attention hides what comes later."""
    found: list[bool] = []
    build = DecoderGraph.build

    def noted(self, progress):
        found.append("causal" not in self._scoring)
        return build(self, progress)

    monkeypatch.setattr(DecoderGraph, "build", noted)
    return found


def test_the_decoder_for_spans_is_made_for_the_first_and_once(tmp_path, load, feed, built) -> None:
    model = load(family_model(tmp_path, "qwen3"))
    contexts = [model.new_context(SIZES) for _ in range(3)]
    for context in contexts:
        feed(context, [1, 2, 3])
    assert built == [True]
    threads = [threading.Thread(target=decode_span, args=(context,)) for context in contexts[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    decode_span(contexts[2])
    decode_span(contexts[2])
    assert built == [True, False]
    assert np.array_equal(decode_span(contexts[0]), decode_span(contexts[1]))


def test_written_out_attention_needs_no_other_decoder(tmp_path, load, built) -> None:
    decode_span(load(family_model(tmp_path, "qwen3")).new_context(BYTES))
    assert built == [True, True], "the one of float32, which loading makes, and the one of bytes"


def test_an_older_runtime_has_spans_where_attention_is_written_out(tmp_path, load, feed, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "1.29.2")
    model = load(family_model(tmp_path, "qwen3"))
    context, of_bytes = model.new_context(SIZES), model.new_context(BYTES)
    assert Capability.BIDIRECTIONAL_BLOCKS in of_bytes.capabilities - context.capabilities
    with pytest.raises(UnsupportedInput, match="bidirectional_blocks"):
        decode_span(context)
    assert len(feed(context, [1, 2, 3])) == len(decode_span(of_bytes)) == 3


@pytest.mark.parametrize(("version", "is_new"), [("1.30.0", True), ("2.0", True), ("1.9.1", False), ("", False)])
def test_versions_are_numbers(monkeypatch, version, is_new) -> None:
    monkeypatch.setattr(runtime, "version", lambda: version)
    assert runtime.can_mask_by_bias() is is_new


def test_alibi_has_no_spans(tmp_path, load) -> None:
    model = load(family_model(tmp_path, "bloom"))
    assert all(Capability.BIDIRECTIONAL_BLOCKS not in model.new_context(sizes).capabilities for sizes in (SIZES, BYTES))


def test_a_decoder_for_spans_that_is_refused_leaves_all_as_it_was(tmp_path, load, feed, monkeypatch) -> None:
    def refuse(self):
        raise UnsupportedModel("no room")

    monkeypatch.setattr(Compiler, "bidirectional", refuse)
    context = load(family_model(tmp_path, "qwen3")).new_context(SIZES)
    feed(context, [1, 2, 3])
    with pytest.raises(DecodeFailed, match="decoder for bidirectional blocks could not be made: no room"):
        decode_span(context)
    assert context.tokens(0) == (1, 2, 3)
    monkeypatch.undo()
    assert len(decode_span(context)) == 3
