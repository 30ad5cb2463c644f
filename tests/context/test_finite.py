"""Results with NaN or infinities are refused, and the rows that show them are read."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.context.batch import TokenBatch
from slm_core.context.finite import check_logits, check_states, check_top, with_last_rows
from slm_core.errors import DecodeFailed
from slm_core.types import Pos, TopLogits

INF, NAN = np.inf, np.nan


def top_of(rows: np.ndarray) -> None:
    check_top(TopLogits(np.zeros((len(rows), 1), np.int32), rows[:, :1], np.zeros(len(rows), np.float32)))


@pytest.mark.parametrize("row", [[NAN, 1, 2], [INF, 1, 2], [NAN, -INF, INF]])
@pytest.mark.parametrize("check", [check_logits, check_states, top_of])
def test_nan_and_infinity_are_refused_in_any_row(check, row) -> None:
    rows = np.array([[3, 2, 1], row, [3, 2, 1]], np.float32)
    check(rows[::2])
    with pytest.raises(DecodeFailed, match="NaN or infinity"):
        check(rows)


def test_tokens_that_are_never_chosen_are_logits_but_no_states() -> None:
    rows = np.array([[-INF, 2, -INF], [-INF] * 3], np.float32)
    check_logits(rows), check_logits(rows[:0]), check_states(rows[:0])
    with pytest.raises(DecodeFailed):
        check_states(rows)


def test_the_last_row_of_each_sequence_is_read() -> None:
    batch = TokenBatch(8)
    batch.extend([1, 2], Pos(3, 0), logits="none")
    batch.extend([1, 2, 3], Pos(0, 5), logits="none")
    batch.add(1, Pos(3, 2), logits=False)
    assert with_last_rows(batch).tolist() == [False, False, False, False, True, True]
    batch.add(4, Pos(0, 8), logits=True)
    assert with_last_rows(batch).tolist() == [False] * 5 + [True, True]
