"""Embedding rows with M-RoPE positions (time, height, width), against transformers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mrope_example import KINDS, Example, N, feed, make_example
from native.architectures.engines import make_subject
from slm_core.errors import UnsupportedInput
from slm_core.types import Capability, ContextOptions, KvType, Pos

BOUND = 1e-4  # clause 9 of the contract: float32, relative
OPTIONS = ContextOptions(n_ctx=256, n_seq_max=3, n_batch=128, kv_type_k=KvType.F32, kv_type_v=KvType.F32)


@pytest.fixture(scope="module", params=KINDS)
def example(request, tmp_path_factory, random_tokens) -> Example:
    return make_example(tmp_path_factory.mktemp("family"), request.param, random_tokens(N))


def test_rows_with_mrope_positions_equal_transformers(example, tier, load, assert_close):
    with load(example.path, tier).new_context(OPTIONS) as context:
        assert Capability.MROPE_POSITIONS in context.capabilities
        assert_close(feed(context, example, 0, N), example.expected, BOUND)


def test_an_image_in_several_batches_gives_the_same_logits(example, load, assert_close):
    with load(example.path).new_context(OPTIONS) as context:
        bounds = [0, 10, 33, 40, 61, 62, 75, 90, N]
        rows = [feed(context, example, *pair) for pair in itertools.pairwise(bounds)]
    assert_close(np.concatenate(rows), example.expected, BOUND)


def test_edits_and_dumps_keep_mrope_positions(example, load, assert_close):
    """After a fork inside an image, a truncation inside it, and a restored dump, the logits stay equal."""
    model = load(example.path)
    with model.new_context(OPTIONS) as context, model.new_context(OPTIONS) as other:
        feed(context, example, 0, 70)
        context.fork(0, 1, 30)
        assert_close(feed(context, example, 30, 80, seq_id=1), example.expected[30:80], BOUND)
        context.truncate(Pos(0, 65))
        other.restore(2, context.dump(0))
        assert_close(feed(context, example, 65, N), example.expected[65:], BOUND)
        assert_close(feed(other, example, 65, N, seq_id=2), example.expected[65:], BOUND)


def test_models_without_mrope_refuse_offsets(tmp_path, load):
    subject = make_subject(tmp_path, "qwen2")
    with load(subject.path).new_context(OPTIONS) as context:
        batch = context.new_batch()
        rows = np.ones((2, subject.model.config.hidden_size), np.float32)
        batch.add_embeddings(rows, Pos(0, 0), offsets=np.array([[0, 0, 0], [1, 1, 1]]))
        context.decode(batch)  # the default positions
        batch.clear()
        batch.add_embeddings(rows, Pos(0, 2), offsets=np.array([[0, 0, 0], [0, 1, 0]]))
        with pytest.raises(UnsupportedInput, match="mrope_positions"):
            context.decode(batch)
