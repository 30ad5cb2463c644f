"""Bidirectional blocks against transformers, and their decoder graph, which is built for the first block."""

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
INT8, F8 = (
    ContextOptions(n_ctx=512, n_seq_max=2, n_batch=256, kv_type_k=kv_type, kv_type_v=kv_type)
    for kv_type in (KvType.Q8_0, KvType.F8_E4M3)
)
SHARE = 0.25
"""The bound, relative to the error of the native engine with f8_e4m3; see ``test_bytecache``."""


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
        expected = feed_blocks(native.new_context(SIZES), tokens)
    assert_close(feed_blocks(load(path).new_context(SIZES), tokens), expected, FLOAT32)


def test_bidirectional_blocks_with_an_8_bit_kv_cache_are_near_transformers(gemma3, load, random_tokens) -> None:
    tokens = random_tokens(N)
    expected = transformers_logits(gemma3.model, tokens)
    ours = relative_errors(feed_blocks(load(gemma3.path).new_context(INT8), tokens), expected)
    with NativeBackend().load(gemma3.path, ModelOptions(backend_options={"tier": "reference"})) as native:
        theirs = relative_errors(feed_blocks(native.new_context(F8), tokens), expected)
    assert 0 < ours.mean() < SHARE * theirs.mean(), (
        f"mean error {ours.mean():.1e}, that of f8_e4m3 is {theirs.mean():.1e}"
    )


def decode_block(context) -> np.ndarray:
    """Append a bidirectional block of three tokens to the sequence."""
    batch = context.new_batch()
    batch.extend([5, 6, 7], Pos(0, context.length(0)), logits="all")
    batch.join_block(3)
    return context.decode(batch).copy()


@pytest.fixture
def built_causal(monkeypatch) -> list[bool]:
    """For each decoder built from now on, whether its attention is causal."""
    is_causal: list[bool] = []
    build = DecoderGraph.build

    def recording_build(self, progress):
        is_causal.append("causal" not in self._scoring)
        return build(self, progress)

    monkeypatch.setattr(DecoderGraph, "build", recording_build)
    return is_causal


def test_the_decoder_for_blocks_is_built_once_for_the_first_block(tmp_path, load, feed, built_causal) -> None:
    model = load(family_model(tmp_path, "qwen3"))
    contexts = [model.new_context(SIZES) for _ in range(3)]
    for context in contexts:
        feed(context, [1, 2, 3])
    assert built_causal == [True]
    threads = [threading.Thread(target=decode_block, args=(context,)) for context in contexts[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    decode_block(contexts[2])
    decode_block(contexts[2])
    assert built_causal == [True, False]
    assert np.array_equal(decode_block(contexts[0]), decode_block(contexts[1]))


def test_composed_attention_needs_no_second_decoder(tmp_path, load, built_causal) -> None:
    decode_block(load(family_model(tmp_path, "qwen3")).new_context(INT8))
    assert built_causal == [True, True], "the float32 decoder, built at load, and the 8-bit decoder"


def test_an_older_runtime_has_blocks_only_with_composed_attention(tmp_path, load, feed, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "1.29.2")
    model = load(family_model(tmp_path, "qwen3"))
    context, int8_context = model.new_context(SIZES), model.new_context(INT8)
    assert Capability.BIDIRECTIONAL_BLOCKS in int8_context.capabilities - context.capabilities
    with pytest.raises(UnsupportedInput, match="bidirectional_blocks"):
        decode_block(context)
    assert len(feed(context, [1, 2, 3])) == len(decode_block(int8_context)) == 3


@pytest.mark.parametrize(("version", "is_new"), [("1.30.0", True), ("2.0", True), ("1.9.1", False), ("", False)])
def test_versions_are_compared_as_numbers(monkeypatch, version, is_new) -> None:
    monkeypatch.setattr(runtime, "version", lambda: version)
    assert runtime.can_mask_by_bias() is is_new


def test_models_with_alibi_have_no_blocks(tmp_path, load) -> None:
    model = load(family_model(tmp_path, "bloom"))
    assert all(Capability.BIDIRECTIONAL_BLOCKS not in model.new_context(sizes).capabilities for sizes in (SIZES, INT8))


def test_a_failed_build_of_the_decoder_for_blocks_changes_nothing(tmp_path, load, feed, monkeypatch) -> None:
    def refuse(self):
        raise UnsupportedModel("no room")

    monkeypatch.setattr(Compiler, "bidirectional", refuse)
    context = load(family_model(tmp_path, "qwen3")).new_context(SIZES)
    feed(context, [1, 2, 3])
    with pytest.raises(DecodeFailed, match="decoder for bidirectional blocks could not be made: no room"):
        decode_block(context)
    assert context.tokens(0) == (1, 2, 3)
    monkeypatch.undo()
    assert len(decode_block(context)) == 3
