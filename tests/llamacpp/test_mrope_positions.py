"""Rows with M-RoPE positions against transformers, and some edits of them against the native engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mrope_example import KINDS, Example, N, feed, make_example
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import ContextFull, DecodeFailed, InvalidSnapshot, SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Context
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, ModelOptions, Pos
from slm_llamacpp.context import LlamaCppContext
from slm_llamacpp.temporal_patches import _in_order, patch_begin
from slm_native.backend import NativeBackend
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import feed as feed_tokens
from tests.llamacpp.test_failures import patch_api, restore_api

BOUND = 1e-4  # clause 9 of the contract: float32, relative
SIZES = ContextOptions(n_ctx=256, n_seq_max=4, n_batch=128, kv_type_k=KvType.F32, kv_type_v=KvType.F32)


@pytest.fixture(scope="module", params=KINDS)
def example(request, tmp_path_factory, random_tokens) -> Example:
    return make_example(tmp_path_factory.mktemp("family"), request.param, random_tokens(N))


@pytest.fixture
def context(example: Example, load: LoadModel) -> Context:
    return load(example.path).new_context(SIZES)


@pytest.fixture
def native(example: Example) -> Iterator[Context]:
    with NativeBackend().load(example.path, ModelOptions(backend_options={"tier": "reference"})) as model:
        yield model.new_context(SIZES)


def test_rows_with_mrope_positions_equal_transformers(example, context, assert_close) -> None:
    assert context.edit_level is EditLevel.TRUNCATE
    assert Capability.MROPE_POSITIONS in context.capabilities
    assert_close(feed(context, example, 0, N), example.expected, BOUND)


def test_an_image_in_several_batches_gives_the_same_logits(example, context, assert_close) -> None:
    bounds = [0, 10, 33, 40, 61, 62, 75, 90, N]
    rows = [feed(context, example, *pair) for pair in itertools.pairwise(bounds)]
    assert_close(np.concatenate(rows), example.expected, BOUND)


@pytest.mark.parametrize("end", [19, 20, 21, 30, 43, 44, 45, 60, 63, 66, 70, 77, 78, 90])
def test_forks_and_truncations_in_images_keep_mrope_positions(example, context, assert_close, end) -> None:
    """A fork and a truncation in text, in an image, between temporal patches of a video, and inside one."""
    feed(context, example, 0, 90)
    context.fork(0, 1, end)
    context.truncate(Pos(0, end))
    for seq_id in (1, 0):
        assert_close(feed(context, example, end, N, seq_id), example.expected[end:], BOUND)


def test_a_restored_dump_with_images_continues(example, context, load, assert_close) -> None:
    feed(context, example, 0, 70)
    other = load(example.path).new_context(SIZES)
    other.restore(2, context.dump(0))
    assert_close(feed(other, example, 70, N, seq_id=2), example.expected[70:], BOUND)


def test_dumped_tokens_are_checked_as_without_mrope_positions(example, context) -> None:
    feed(context, example, 0, 40)
    snapshot = SequenceSnapshot.from_bytes(context.dump(0))
    tokens = snapshot.tokens.copy()
    tokens[3] = 10**6
    with pytest.raises(InvalidSnapshot, match="vocabulary"):
        context.restore(1, dataclasses.replace(snapshot, tokens=tokens).to_bytes())
    assert context.length(1) == 0


def test_a_fork_shares_whole_temporal_patches_and_copies_the_rest(example, load) -> None:
    sizes = ContextOptions(n_ctx=98, n_seq_max=3, n_batch=98, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
    context = load(example.path).new_context(sizes)
    feed(context, example, 0, 90)
    context.fork(0, 1, 66)  # the end of a temporal patch of the video
    assert context.n_free == 8
    context.fork(0, 2, 63)  # three of its rows
    assert context.n_free == 5
    context.drop(1)
    with pytest.raises(ContextFull):
        context.fork(0, 1, 30)  # ten rows of the image
    feed_tokens(context, [1, 2, 3, 4, 5], 2)
    assert context.n_free == 0


def test_edits_of_text_decode_nothing_again(example, context, no_rebuild) -> None:
    whole = feed_tokens(context, list(range(40)))
    context.fork(0, 1, 20)
    context.truncate(Pos(0, 30))
    for seq_id, length in ((0, 30), (1, 20)):
        assert np.allclose(feed_tokens(context, list(range(length, 40)), seq_id), whole[length:], atol=1e-4)


def test_bidirectional_blocks_in_an_image_are_replayed_as_blocks(example, context, native, assert_close) -> None:
    logits = []
    for each in (context, native):
        batch = each.new_batch()
        batch.extend(example.tokens[:20], Pos(0, 0))
        batch.add_embeddings(example.rows[20:44], Pos(0, 20), offsets=example.offsets[20:44])
        batch.join_block(12)
        batch.extend(example.tokens[44:50], Pos(0, 44))
        each.decode(batch)
        each.fork(0, 1, 32)  # the start of the block
        each.truncate(Pos(0, 44))
        logits.append([feed_tokens(each, example.tokens[80:90], seq_id) for seq_id in (0, 1)])
    for ours, expected in zip(*logits, strict=True):
        assert_close(ours, expected, BOUND)


@pytest.mark.parametrize("code", [1, None])
def test_a_batch_that_fails_in_an_image_changes_nothing(example, context, assert_close, code) -> None:
    """The rows of the failed batch have the same temporal position as rows before it."""
    feed(context, example, 0, 25)

    def decode_and_fail(pointer: int, llama_batch: Any) -> int:
        api.llama_decode(pointer, llama_batch)
        restore_api(context, api)
        if code is None:
            raise KeyboardInterrupt
        return code

    api = patch_api(context, llama_decode=decode_and_fail)
    with pytest.raises((DecodeFailed, KeyboardInterrupt)):
        feed(context, example, 25, 40)
    assert context.length(0) == 25
    assert_close(feed(context, example, 25, N), example.expected[25:], BOUND)


def test_a_sequence_is_repaired_once(example, context, monkeypatch) -> None:
    feed(context, example, 0, 70)
    context._memory.remove(0, 0)  # as if an interrupt came between llama.cpp and the ledger
    context._counted[0] = 0
    repaired, rebuild = [], LlamaCppContext._rebuild

    def recording(self: LlamaCppContext, seq_id: int) -> None:
        repaired.append(seq_id)
        rebuild(self, seq_id)

    monkeypatch.setattr(LlamaCppContext, "_rebuild", recording)
    for dst in (1, 2):
        context.fork(0, dst)
    assert repaired == [0]


def test_positions_must_increase_in_time_then_height_then_width() -> None:
    positions = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 5), (1, 0, 0), (1, 0, 0), (1, 2, 3), (0, 9, 9), (-1, 0, 0)]
    expected = [True, True, True, False, True, False, True, False, False]
    assert _in_order(np.array(positions)).tolist() == expected
    farthest = 2**31 - 1  # of int32
    assert _in_order(np.array([(0, 0, farthest), (farthest, 0, 0), (farthest + 1, 0, 0)])).tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "edit", [lambda c: c.fork(0, 1, 30), lambda c: c.truncate(Pos(0, 30))], ids=["fork", "truncate"]
)
def test_an_edit_that_fails_in_an_image_changes_nothing(
    example, context, assert_close, edit: Callable[[Context], None]
) -> None:
    feed(context, example, 0, 70)

    def decode_and_fail(pointer: int, llama_batch: Any) -> int:
        restore_api(context, api)
        return 1

    api = patch_api(context, llama_decode=decode_and_fail)
    with pytest.raises(DecodeFailed, match="no room"):
        edit(context)
    assert (context.length(0), context.length(1), context.n_free) == (70, 0, 256 - 70)
    assert_close(feed(context, example, 70, N), example.expected[70:], BOUND)
    feed(context, example, 0, 50, seq_id=1)
    context.truncate(Pos(1, 40))
    assert_close(feed(context, example, 40, N, seq_id=1), example.expected[40:], BOUND)


@pytest.mark.parametrize(
    "edit",
    [lambda c: c.fork(0, 1, 66), lambda c: c.truncate(Pos(0, 66)), lambda c: c.restore(1, c.dump(0))],
    ids=["fork", "truncate", "dump"],
)
def test_a_call_after_an_interrupt_repairs_the_sequence(example, context, assert_close, edit) -> None:
    """An interrupted call may leave llama.cpp without some of the cells; it marks their number as unknown."""
    feed(context, example, 0, 70)
    context._counted[0] = -1
    context._memory.remove(0, 30)
    edit(context)
    for seq_id in range(2):
        if length := context.length(seq_id):
            assert_close(feed(context, example, length, N, seq_id), example.expected[length:], BOUND)


@pytest.mark.parametrize(
    "offsets",
    [
        [(0, 0, 0), (0, 0, 0)],  # equal positions
        [(0, 1, 0), (0, 0, 1)],
        [(1, 0, 0), (0, 5, 5)],
        [(-2, 0, 0), (0, 0, 0)],  # before the text
        [(-1, -2, 0), (0, 0, 0)],  # at the temporal position of its end, but higher
    ],
)
def test_rows_that_would_attend_to_later_rows_are_refused(example, context, native, offsets) -> None:
    for each in (context, native):
        feed_tokens(each, [1, 2, 3])
        batch = each.new_batch()
        batch.add_embeddings(example.rows[:2], Pos(0, 3), offsets=np.array(offsets))
        if each is native:
            each.decode(batch)
        else:
            with pytest.raises(UnsupportedInput, match="rows in increasing order of time"):
                each.decode(batch)
            assert each.length(0) == 3
    with pytest.raises(SnapshotMismatch, match="rows in increasing order of time"):
        context.restore(1, native.dump(0))
    feed_tokens(context, [4])


def test_rows_at_the_temporal_position_of_text_form_a_patch_with_it(example, context, native, assert_close) -> None:
    logits = []
    for each in (context, native):
        feed_tokens(each, [1, 2, 3])
        batch = each.new_batch()
        batch.add_embeddings(example.rows[:3], Pos(0, 3), offsets=np.array([(-1, 0, 0), (-1, 0, 1), (0, 0, 0)]))
        each.decode(batch)
        each.truncate(Pos(0, 4))
        logits.append(feed_tokens(each, [4, 5, 6]))
    assert_close(*logits, BOUND)


def test_patch_begin() -> None:
    positions = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [2, 1, 1], [2, 1, 2], [4, 4, 4]], np.int64)
    assert [patch_begin(positions, length) for length in range(7)] == [0, 1, 1, 3, 3, 5, 6]
