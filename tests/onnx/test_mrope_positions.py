"""Rows with M-RoPE positions against transformers, and edits of them against the native engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mrope_example import KINDS, Example, N, make_example
from mrope_example import feed as feed_part
from slm_conformance.oracle.families import family_model
from slm_core.errors import UnsupportedInput
from slm_core.types import Capability, ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend

FLOAT32 = 1e-4  # clause 9 of the contract, relative
SIZES = ContextOptions(n_ctx=256, n_seq_max=4, n_batch=128)


@pytest.fixture(scope="module", params=KINDS)
def example(request, tmp_path_factory, random_tokens) -> Example:
    return make_example(tmp_path_factory.mktemp("family"), request.param, random_tokens(N))


@pytest.mark.parametrize("buckets", [False, True])
def test_rows_with_mrope_positions_equal_transformers(example, load, assert_close, buckets) -> None:
    with load(example.path, buckets=buckets).new_context(SIZES) as context:
        assert Capability.MROPE_POSITIONS in context.capabilities
        assert_close(feed_part(context, example, 0, N), example.expected, FLOAT32)


def test_an_image_in_several_batches_gives_the_same_logits(example, load, assert_close) -> None:
    with load(example.path, buckets=True).new_context(SIZES) as context:
        bounds = [0, 10, 33, 40, 61, 62, 75, 90, N]
        rows = [feed_part(context, example, *pair) for pair in itertools.pairwise(bounds)]
    assert_close(np.concatenate(rows), example.expected, FLOAT32)


def run_edits(context, example, feed, tokens):
    """Logits after cuts in and before images: of a sequence, of its forks and of a restored dump."""
    feed_part(context, example, 0, 90)
    context.cut(Pos(0, 0), Pos(0, 30))  # text and a part of the image; the sequence starts with the rest
    context.fork(0, 1, 12)
    context.cut(Pos(0, 40), Pos(0, 45))  # in the video, with fewer tokens after it than before it
    context.cut(Pos(0, 5), Pos(0, 17))  # the end of the image, partly shared with the fork
    context.restore(2, context.dump(0))
    context.fork(2, 3, 20)
    context.cut(Pos(2, 3), Pos(2, 7))
    context.truncate(Pos(0, 25))  # in the video
    return [feed(context, tokens, seq_id) for seq_id in range(4)]


def test_edited_images_equal_the_native_engine(example, load, feed, random_tokens, assert_close) -> None:
    tokens = random_tokens(15, seed=2)
    actual_rows = run_edits(load(example.path).new_context(SIZES), example, feed, tokens)
    with NativeBackend().load(example.path, ModelOptions(backend_options={"tier": "reference"})) as native:
        expected_rows = run_edits(native.new_context(SIZES), example, feed, tokens)
    for actual, expected in zip(actual_rows, expected_rows, strict=True):
        assert_close(actual, expected, FLOAT32)


def test_models_without_mrope_refuse_offsets(tmp_path, load) -> None:
    model = load(family_model(tmp_path, "qwen3"))
    with model.new_context(SIZES) as context:
        batch = context.new_batch()
        rows = np.ones((2, model.info.n_embd), np.float32)
        batch.add_embeddings(rows, Pos(0, 0), offsets=np.array([[0, 0, 0], [0, 1, 0]]))
        with pytest.raises(UnsupportedInput, match="mrope_positions"):
            context.decode(batch)
