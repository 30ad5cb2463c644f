"""Batches of tokens, embedding rows and bidirectional blocks as parts for llama.cpp, and the arrays that it reads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.context.batch import TokenBatch
from slm_core.types import EMBEDDED, Pos
from slm_llamacpp import library
from slm_llamacpp.batchbuffers import BatchBuffers, parts_of_a_kind

WIDTH = 3


def table_rows(tokens: np.ndarray) -> np.ndarray:
    """The row of a token: its number, negative."""
    return np.repeat(-tokens[:, None].astype(np.float32), WIDTH, axis=1)


runs = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=1, max_size=4),  # for each input, whether it is an embedding row
        st.booleans(),  # whether they are a bidirectional block
        st.integers(0, 2),  # the sequence
    ),
    max_size=6,
)


def batch_of(runs: list[tuple[list[bool], bool, int]]) -> TokenBatch:
    """Inputs are numbered; each second one has logits."""
    batch, lengths = TokenBatch(32), [0, 0, 0]
    for kinds, is_block, seq_id in runs:
        for is_row in kinds:
            number, at = len(batch) + 1, Pos(seq_id, lengths[seq_id])
            if is_row:
                batch.add_embeddings(
                    np.full((1, WIDTH), number, np.float32), at, logits="last" if number % 2 else "none"
                )
            else:
                batch.add(number, at, logits=bool(number % 2))
            lengths[seq_id] += 1
        if is_block and len(kinds) > 1:
            batch.join_block(len(kinds))
    return batch


@settings(max_examples=200, deadline=None, derandomize=True)
@given(runs)
def test_parts_are_the_batch_in_order(runs) -> None:
    batch = batch_of(runs)
    if not len(batch):
        return
    parts = list(parts_of_a_kind(batch, batch.positions, batch.logits_mask, table_rows))
    for name, expected in (
        ("seq_ids", batch.seq_ids),
        ("positions", batch.positions),
        ("output_mask", batch.logits_mask),
        ("tokens", batch.tokens),
    ):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), expected)
    first = 0
    for part in parts:
        is_row = part.tokens == EMBEDDED
        if part.rows is None:
            assert not is_row.any(), "a part of tokens has embedding rows"
        else:
            assert is_row.all() or (part.is_block and is_row.any()), "a part of rows has tokens, and is no block"
            expected_rows = np.where(is_row, first + 1 + np.arange(len(is_row)), -part.tokens)
            np.testing.assert_array_equal(part.rows, np.repeat(expected_rows[:, None], WIDTH, axis=1))
        expected_ahead = np.arange(len(is_row))[::-1] if part.is_block else np.zeros(len(is_row))
        np.testing.assert_array_equal(batch.ahead[first : first + len(is_row)], expected_ahead)
        first += len(is_row)
    for one, other in itertools.pairwise(parts):
        assert one.is_block or other.is_block or (one.rows is None) != (other.rows is None), "parts could be one"


@pytest.fixture
def api() -> Any:
    return library.load()


def test_tokens_for_llamacpp(api) -> None:
    buffers = BatchBuffers(api, 8, np.array([[0, 10], [1, 11], [2, 12]], np.int32))
    for n in (5, 3):  # the buffers are reused
        tokens, seq_ids = np.arange(n, dtype=np.int32) + 7, np.arange(n, dtype=np.int32) % 3
        batch = buffers.fill(tokens, seq_ids, 2 * tokens, tokens % 2 == 0)
        assert (batch.n_tokens, bool(batch.embd)) == (n, False)
        assert batch.token[:n] == tokens.tolist()
        assert batch.pos[:n] == (2 * tokens).tolist()
        assert batch.n_seq_id[:n] == [2] * n
        assert [batch.seq_id[i][:2] for i in range(n)] == [[seq_id, 10 + seq_id] for seq_id in seq_ids.tolist()]
        assert batch.logits[:n] == (tokens % 2 == 0).tolist()


def test_rows_for_llamacpp(api) -> None:
    """M-RoPE: the positions of rows are axis by axis, the last of four axes is 0; tokens have the time alone."""
    buffers = BatchBuffers(api, 8, np.array([[0], [1]], np.int32), n_axes=4)
    rows, seq_ids = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 0], np.int32)
    both, ids = np.array([True, False]), np.full(2, EMBEDDED, np.int32)
    on_axes = np.array([[5, 6, 7], [5, 8, 9]])
    batch = buffers.fill(ids, seq_ids, on_axes, both, rows)
    assert (batch.n_tokens, bool(batch.token)) == (2, False)
    assert batch.embd[:6] == rows.ravel().tolist()
    assert batch.pos[:8] == [5, 5, 6, 8, 7, 9, 0, 0]
    assert batch.logits[:2] == [1, 0]
    batch = buffers.fill(ids, seq_ids, np.array([3, 4]), both, rows)
    assert batch.pos[:8] == [3, 4, 3, 4, 3, 4, 0, 0]
    batch = buffers.fill(np.array([8, 9], np.int32), seq_ids, on_axes, both)
    assert (batch.pos[:2], bool(batch.embd)) == ([5, 5], False)
    without_mrope = BatchBuffers(api, 8, np.array([[0], [1]], np.int32))
    batch = without_mrope.fill(ids, seq_ids, np.array([3, 4]), both, rows[:, ::-1])
    assert (batch.pos[:2], batch.embd[:6]) == ([3, 4], rows[:, ::-1].ravel().tolist())
