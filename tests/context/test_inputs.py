"""Embedding rows: in a batch, in the inputs of a sequence, in a dump byte by byte."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from slm_core.container import unpack
from slm_core.context.batch import TokenBatch
from slm_core.context.inputs import (
    HeldInput,
    add_held,
    ahead_of,
    batch_inputs,
    chunks_of,
    held_inputs,
    next_mrope_position,
    offset_of,
    offsets_of,
    rows_of,
    token_ids,
)
from slm_core.context.ledger import Ledger, replay_plan
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import BatchFull, InvalidEmbedding, InvalidOption, InvalidSnapshot
from slm_core.types import EMBEDDED, Pos

ROWS = np.arange(20, dtype=np.float32).reshape(4, 5)


def test_a_batch_holds_rows_among_tokens():
    batch = TokenBatch(8)
    batch.add(7, Pos(0, 0))
    batch.add_embeddings(ROWS[:2], Pos(0, 1), logits="last")
    batch.add(8, Pos(1, 4), logits=True)
    batch.add_embeddings(ROWS[2:3], Pos(1, 5), logits="all")
    assert batch.tokens.tolist() == [7, EMBEDDED, EMBEDDED, 8, EMBEDDED]
    assert batch.seq_ids.tolist() == [0, 0, 0, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2, 4, 5]
    assert batch.logits_mask.tolist() == [False, False, True, True, True]
    np.testing.assert_array_equal(batch.embeddings, ROWS[:3])
    batch.clear()
    assert (len(batch), batch.embeddings.shape) == (0, (0, 0))


def test_a_batch_copies_its_rows():
    batch, rows = TokenBatch(4), ROWS.copy()
    batch.add_embeddings(rows, Pos(0, 0))
    rows[:] = 99
    np.testing.assert_array_equal(batch.embeddings, ROWS)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (ROWS.astype(np.float64), r"float64 of shape \(4, 5\) \(accepted: a NumPy array, float32 \[rows, E\]\)"),
        (ROWS[0], r"float32 of shape \(5,\)"),
        (ROWS.tolist(), "list"),
        (np.where(ROWS == 12, np.nan, ROWS).astype(np.float32), "row 2 of 4 contains an infinite number or NaN"),
        (ROWS[:, :2], "2 wide .accepted: 5, the width of the rows in the batch"),
    ],
    ids=["float64", "flat", "list", "nan", "narrow"],
)
def test_invalid_rows_are_refused(rows, match):
    batch = TokenBatch(8)
    batch.add_embeddings(ROWS[:1], Pos(0, 0))
    with pytest.raises(InvalidEmbedding, match=match):
        batch.add_embeddings(rows, Pos(0, 1))
    assert (len(batch), len(batch.embeddings)) == (1, 1)


def test_rows_that_do_not_fit_are_not_stored():
    batch = TokenBatch(3)
    with pytest.raises(BatchFull, match="4 tokens do not fit: 3 of 3 places are free"):
        batch.add_embeddings(ROWS, Pos(0, 0))
    with pytest.raises(InvalidOption, match="logits='some'"):
        batch.add_embeddings(ROWS[:1], Pos(0, 0), logits="some")
    assert (len(batch), len(batch.embeddings)) == (0, 0)


def test_held_inputs_can_be_added_to_a_batch_again():
    inputs = held_inputs(np.array([5, EMBEDDED, EMBEDDED, 6, EMBEDDED], np.int32), rows=ROWS[:3])
    assert token_ids(inputs) == [5, EMBEDDED, EMBEDDED, 6, EMBEDDED]
    np.testing.assert_array_equal(rows_of(inputs), ROWS[:3])
    batch = TokenBatch(5)
    add_held(batch, inputs, Pos(1, 10))
    assert batch.tokens.tolist() == token_ids(inputs)
    assert batch.positions.tolist() == [10, 11, 12, 13, 14]
    np.testing.assert_array_equal(batch.embeddings, ROWS[:3])


def test_edits_keep_the_rows_of_their_tokens():
    """A replay decodes the rows of the first decode, also after forks, cuts and forgotten edits."""
    ledger = Ledger(64, 3, share_forks=True)
    ledger.append(0, held_inputs(np.array([1, EMBEDDED, 2, EMBEDDED, EMBEDDED, 3], np.int32), rows=ROWS[:3]))
    ledger.cut(0, 1, 4)  # forgets rows 0 and 1
    ledger.append(0, [HeldInput(EMBEDDED, ROWS[3])])
    ledger.fork(0, 1, 4)
    ledger.truncate(1, 2)
    runs, _ = replay_plan(ledger.inputs(0), ledger.edits(0))
    assert [token_ids(run) for run in runs] == [[1, EMBEDDED, 2, EMBEDDED, EMBEDDED, 3], [EMBEDDED]]
    np.testing.assert_array_equal(rows_of([*runs[0], *runs[1]]), ROWS)
    np.testing.assert_array_equal(rows_of(ledger.inputs(1)), ROWS[2:3])


def snapshot_with_rows(**changes) -> SequenceSnapshot:
    parts = {
        "backend": "one",
        "payload_format": "",
        "fingerprint": "f",
        "tokens": np.array([4, EMBEDDED, EMBEDDED], np.int32),
        "edits": (Edit(1, (7, HeldInput(EMBEDDED, ROWS[2])), 4),),
        "payload": b"xyz",
        "rows": ROWS[:2],
    }
    return SequenceSnapshot(**(parts | changes))


def test_the_rows_of_a_dump_have_their_own_section():
    data = snapshot_with_rows().to_bytes()
    _, sections = unpack("sequence", data)
    assert sections == [
        struct.pack("<3i", 4, -1, -1),
        struct.pack("<2i", 7, -1),
        b"xyz",
        struct.pack("<15f", *range(15)),
    ]
    restored = SequenceSnapshot.from_bytes(data)
    np.testing.assert_array_equal(restored.rows, ROWS[:2])
    np.testing.assert_array_equal(rows_of(restored.held()), ROWS[:2])
    np.testing.assert_array_equal(rows_of(restored.edits[0].removed), ROWS[2:3])
    assert restored.to_bytes() == data


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rows": ROWS[:1]}, "40 bytes of embedding rows, and 3 ids"),
        ({"rows": ROWS}, "100 bytes of embedding rows, and 3 ids"),
        ({"rows": np.empty((0, 5), np.float32), "edits": ()}, "0 bytes of embedding rows, and 2 ids"),
        ({"tokens": np.array([4], np.int32), "edits": ()}, "40 bytes of embedding rows, and 0 ids"),
        ({"rows": np.full((2, 5), np.inf, np.float32)}, "no model computes"),
    ],
    ids=["missing", "too many", "none", "for nobody", "infinite"],
)
def test_invalid_rows_of_a_dump_are_refused(changes, match):
    with pytest.raises(InvalidSnapshot, match=match):
        SequenceSnapshot.from_bytes(snapshot_with_rows(**changes).to_bytes())


def test_a_block_is_the_last_tokens_of_a_batch():
    batch = TokenBatch(12)
    batch.extend([1, 2, 3], Pos(0, 4))
    batch.add_embeddings(ROWS[:2], Pos(0, 7))
    batch.join_block(4)
    batch.extend([5, 6], Pos(0, 9))
    batch.join_block(1)
    assert batch.ahead.tolist() == [0, 3, 2, 1, 0, 0, 0]
    batch.clear()
    batch.extend([1, 2, 3], Pos(0, 0))
    assert batch.ahead.tolist() == [0, 0, 0], "a cleared batch has no blocks"


@pytest.mark.parametrize("n", [0, 8, -1, True, 2.0])
def test_a_block_of_missing_tokens_is_refused(n):
    batch = TokenBatch(12)
    batch.extend(range(7), Pos(0, 0))
    with pytest.raises(InvalidOption, match="accepted: 1 to 7"):
        batch.join_block(n)


def test_a_block_is_one_run_of_one_sequence():
    batch = TokenBatch(12)
    batch.extend([1, 2], Pos(0, 0))
    batch.extend([3, 4], Pos(1, 2))
    batch.extend([5], Pos(1, 7))
    for n in (2, 4):
        with pytest.raises(InvalidOption, match="cannot be a bidirectional block"):
            batch.join_block(n)
    batch.extend([6], Pos(1, 8))
    batch.join_block(2)
    with pytest.raises(InvalidOption, match="none in a block yet"):
        batch.join_block(2)
    batch.extend([7], Pos(1, 9))
    for n in (2, 3):
        with pytest.raises(InvalidOption, match="none in a block yet"):
            batch.join_block(n)
    batch.join_block(1)
    assert batch.ahead.tolist() == [0, 0, 0, 0, 1, 0, 0]


def test_chunks_do_not_split_blocks():
    ahead = np.array([0, 0, 2, 1, 0, 0, 1, 0, 0], np.int32)
    inputs = held_inputs(np.arange(9, dtype=np.int32), ahead=ahead)
    assert [token_ids(chunk) for chunk in chunks_of(inputs, 4)] == [[0, 1], [2, 3, 4, 5], [6, 7, 8]]
    assert [token_ids(chunk) for chunk in chunks_of(inputs, 3)] == [[0, 1], [2, 3, 4], [5, 6, 7], [8]]
    batch = TokenBatch(9)
    add_held(batch, inputs, Pos(0, 0))
    assert batch.ahead.tolist() == ahead.tolist()


def test_the_blocks_of_a_dump_have_their_own_section():
    whole = snapshot_with_rows(
        ahead=np.array([2, 1, 0], np.int32), edits=(Edit(1, (HeldInput(7, ahead=1), 8), 5),), rows=ROWS[:2]
    )
    data = whole.to_bytes()
    _, sections = unpack("sequence", data)
    assert sections[4] == struct.pack("<5i", 2, 1, 0, 1, 0)
    restored = SequenceSnapshot.from_bytes(data)
    assert [ahead_of(one) for one in (*restored.held(), *restored.edits[0].removed)] == [2, 1, 0, 1, 0]
    assert restored.to_bytes() == data


GRID = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
OF_EACH = [[0, 0, 0], [-1, -1, 0], [-2, -1, -2], [-2, -1, -1]]
"""The same offsets, relative to the M-RoPE position of a token instead of each row: 0, 1, 2 and 2."""


def test_offsets_count_from_the_start_of_a_run():
    batch = TokenBatch(12)
    batch.extend([1, 2], Pos(0, 0))
    batch.add_embeddings(ROWS, Pos(0, 2), offsets=GRID)
    batch.add_embeddings(ROWS[:1], Pos(0, 6))
    assert batch.offsets.tolist() == [*OF_EACH, [0, 0, 0]]
    batch.clear()
    batch.add_embeddings(ROWS[:2], Pos(0, 0), offsets=np.array([[0, 0, 0], [1, 1, 1]]))
    assert batch.offsets.shape == (0, 3), "default positions count as no offsets"


def test_mrope_positions_after_rows_with_offsets():
    inputs = held_inputs(np.array([5, *[EMBEDDED] * 4, 6], np.int32), rows=ROWS, offsets=np.array(OF_EACH, np.int32))
    assert [next_mrope_position(inputs[:n]) for n in range(7)] == [0, 1, 2, 3, 3, 3, 4]
    assert offsets_of(inputs).tolist() == OF_EACH
    assert offsets_of([inputs[0], inputs[1], inputs[5]]).shape == (0, 3)


def test_rows_with_offsets_keep_them_in_a_new_batch():
    """The run as a whole, and in parts that each start a new run."""
    inputs = held_inputs(np.array([5, *[EMBEDDED] * 4, 6], np.int32), rows=ROWS, offsets=np.array(OF_EACH, np.int32))
    for sizes in ([6], [3, 3], [1, 1, 1, 1, 1, 1]):
        actual, done = [], 0
        for n in sizes:
            batch = TokenBatch(n)
            add_held(batch, inputs[done : done + n], Pos(0, done))
            actual += batch_inputs(batch)
            done += n
        assert [offset_of(one) for one in actual] == [offset_of(one) for one in inputs]


@pytest.mark.parametrize(
    "offsets", [GRID[:3], GRID * 1.0, GRID[:, :2], GRID.tolist(), GRID + (2**20 + 1), GRID - 2**21]
)
def test_invalid_offsets_are_refused(offsets):
    batch = TokenBatch(8)
    with pytest.raises(InvalidEmbedding, match=r"^offsets are") as raised:
        batch.add_embeddings(ROWS, Pos(0, 0), offsets=offsets)
    assert "\n" not in str(raised.value)
    assert len(batch) == 0


def test_a_dump_contains_the_offsets_of_removed_rows():
    inputs = held_inputs(np.array([5, *[EMBEDDED] * 4, 6], np.int32), rows=ROWS, offsets=np.array(OF_EACH, np.int32))
    edits = (Edit(1, tuple(inputs[1:4]), 6),)
    remaining = [inputs[0], *inputs[4:]]
    snapshot = SequenceSnapshot("a", "b", "c", np.array(token_ids(remaining), np.int32), edits, b"", rows_of(remaining))
    restored = SequenceSnapshot.from_bytes(replace(snapshot, offsets=offsets_of(remaining)).to_bytes())
    assert [offset_of(one) for one in restored.held()] == [offset_of(one) for one in remaining]
    assert [offset_of(one) for one in restored.edits[0].removed] == [offset_of(one) for one in inputs[1:4]]
    with pytest.raises(InvalidSnapshot, match="offsets of rows that are out of range"):
        SequenceSnapshot.from_bytes(replace(snapshot, offsets=offsets_of(remaining) + 2**21).to_bytes())
