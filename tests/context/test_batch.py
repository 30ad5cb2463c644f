"""The batch compared with plain lists, and the inputs that it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slm_core.context.batch import TokenBatch
from slm_core.errors import BatchFull, InvalidOption, InvalidPosition, InvalidSequence, InvalidToken
from slm_core.types import Pos

INT32_MAX = 2**31 - 1
RUNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, INT32_MAX), max_size=6),
        st.integers(0, INT32_MAX),
        st.integers(0, INT32_MAX - 6),
        st.sampled_from(["none", "last", "all"]),
    ),
    max_size=8,
)


def rows(batch: TokenBatch) -> list[tuple[int, int, int, bool]]:
    columns = (batch.tokens, batch.seq_ids, batch.positions, batch.logits_mask)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(RUNS, st.integers(1, 30), st.booleans())
def test_runs_equal_lists_of_rows(runs, capacity, as_array):
    batch, expected = TokenBatch(capacity), []
    for tokens, seq_id, first, logits in runs:
        new = [(t, seq_id, first + i, logits == "all") for i, t in enumerate(tokens)]
        if new and logits == "last":
            new[-1] = (*new[-1][:3], True)
        given_tokens = np.array(tokens, np.int64) if as_array else tokens
        if len(expected) + len(new) > capacity:
            with pytest.raises(BatchFull):
                batch.extend(given_tokens, Pos(seq_id, first), logits=logits)
        else:
            batch.extend(given_tokens, Pos(seq_id, first), logits=logits)
            expected += new
        assert rows(batch) == expected
        assert len(batch) == len(expected)
    assert batch.capacity == capacity
    batch.clear()
    assert rows(batch) == []


def test_add_is_a_run_of_one():
    batch = TokenBatch(2)
    batch.add(7, Pos(1, 3))
    batch.add(8, Pos(0, 5), logits=True)
    assert rows(batch) == [(7, 1, 3, False), (8, 0, 5, True)]
    with pytest.raises(BatchFull, match="1 tokens do not fit: 0 of 2 places are free"):
        batch.add(9, Pos(0, 6))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_integer_arrays_of_any_dtype_are_accepted(dtype):
    batch = TokenBatch(3)
    batch.extend(np.array([1, 2, 3], dtype), Pos(0, 0))
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.tokens.dtype == np.int32


@pytest.mark.parametrize(
    "tokens",
    [[-1], [0, 2**31], [2**63], [1.0], ["a"], [[1, 2]], [True], np.array([0.5]), np.array(3), np.empty((0, 2))],
    ids=repr,
)
def test_impossible_tokens_are_refused(tokens):
    batch = TokenBatch(4)
    batch.add(5, Pos(0, 0))
    with pytest.raises(InvalidToken):
        batch.extend(tokens, Pos(0, 1))
    assert rows(batch) == [(5, 0, 0, False)]


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (Pos(-1, 0), InvalidSequence),
        (Pos(2**31, 0), InvalidSequence),
        (Pos(0, -1), InvalidPosition),
        (Pos(0, INT32_MAX), InvalidPosition),
    ],
)
def test_impossible_positions_are_refused(start, error):
    batch = TokenBatch(4)
    with pytest.raises(error):
        batch.extend([1, 2], start)
    assert rows(batch) == []


def test_an_unknown_value_of_logits_is_refused():
    batch = TokenBatch(4)
    with pytest.raises(InvalidOption, match="'none', 'last', 'all'"):
        batch.extend([1], Pos(0, 0), logits="first")
    assert len(batch) == 0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity):
    with pytest.raises(InvalidOption):
        TokenBatch(capacity)


def test_the_arrays_of_a_batch_are_read_only():
    batch = TokenBatch(4)
    batch.extend([1, 2], Pos(0, 0))
    for column in (batch.tokens, batch.seq_ids, batch.positions, batch.logits_mask):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
