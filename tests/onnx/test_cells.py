"""The cell table against one list per sequence: after any operations, each sequence reads the tokens of its list."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_onnx.cells import FARTHEST, CellTable, Move

N_CELLS, N_SEQ = 24, 3


class Memory:
    """A model of the cache: each cell has a token and the RoPE position of its key."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, int] | None] = [None] * N_CELLS

    def run(self, move: Move | None) -> None:
        if move is None:
            return
        tokens = [self.cells[cell] for cell in move.source]
        for i, (cell, delta) in enumerate(zip(tokens, move.delta, strict=True)):
            self.cells[move.to + i] = None if cell is None else (cell[0], cell[1] + int(delta))


operation = st.tuples(
    st.sampled_from(
        [
            *["append", "append", "append", "fork", "truncate", "cut", "cut", "drop", "compact", "see"],
            *["exchange", "exchange and undo", "share"],
        ]
    ),
    st.integers(0, N_SEQ - 1),
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),  # M-RoPE positions that each token takes
)


class PlacedToken(NamedTuple):
    """A token, and the number of M-RoPE positions that it takes."""

    token: int
    n_positions: int


def next_position(tokens: list[PlacedToken]) -> int:
    """The M-RoPE position after these tokens."""
    return sum(one.n_positions for one in tokens)


@given(st.lists(operation, min_size=5, max_size=40))
@settings(max_examples=300, deadline=None)
def test_every_sequence_reads_the_tokens_of_its_list(operations) -> None:
    table, memory = CellTable(N_CELLS, N_SEQ), Memory()
    lists: list[list[PlacedToken]] = [[] for _ in range(N_SEQ)]
    token = iter(range(10_000))
    for name, seq, a, b, position_counts in operations:
        if name == "append":
            n = min(a, N_CELLS - table.n_used)
            new = [PlacedToken(next(token), n_positions) for n_positions in position_counts[:n]]
            seq_ids = np.full(n, seq, np.int32)
            starts = np.array([next_position([*lists[seq], *new[:i]]) for i in range(n)], np.int64)
            for i, (one, angle) in enumerate(zip(new, table.angles(seq_ids, starts), strict=True)):
                memory.cells[table.n_used + i] = (one.token, int(angle))
            positions = np.arange(len(lists[seq]), len(lists[seq]) + n, dtype=np.int32)
            table.append(seq_ids, table.indices(seq_ids, positions))
            lists[seq] += new
        elif name == "fork":
            dst = (seq + 1) % N_SEQ
            table.drop(dst)
            end = min(a, len(lists[seq]))
            table.fork(seq, dst, end)
            lists[dst] = lists[seq][:end]
        elif name == "truncate":
            table.truncate(seq, a)
            lists[seq] = lists[seq][:a]
        elif name == "drop":
            table.drop(seq)
            lists[seq] = []
        elif name in ("exchange", "exchange and undo", "share"):
            shared = None
            if name == "share":  # with the first tokens of another sequence
                src = (seq + 1) % N_SEQ
                table.drop(seq)
                lists[seq] = []
                shared = src, min(b, len(lists[src]))
            n = min(a, N_CELLS - table.n_used)
            new = [PlacedToken(next(token), n_positions) for n_positions in position_counts[:n]]
            prefix = [] if shared is None else lists[shared[0]][: shared[1]]
            first = b if shared is None else table.first_angle(shared[0])
            for i, one in enumerate(new):
                memory.cells[table.n_used + i] = (one.token, first + next_position([*prefix, *new[:i]]))
            before = table.holding(seq)
            table.exchange(seq, first, n, shared)
            assert table.first_angle(seq) == first
            if name == "exchange and undo":
                table.hold(seq, before)
            else:
                lists[seq] = [*prefix, *new]
        elif name == "compact":
            memory.run(table.compact())
            assert table.n_idle == 0, "unused cells are left after a compaction"
        elif name == "cut":
            start, end = sorted((min(a, len(lists[seq])), min(b, len(lists[seq]))))
            n_removed = next_position(lists[seq][start:end])
            n_copied = table.n_copied_by_cut(seq, start, end, n_removed)
            if start == end or table.n_used + n_copied > N_CELLS:
                continue
            move = table.cut(seq, start, end, n_removed)
            assert (0 if move is None else len(move.source)) == n_copied
            memory.run(move)
            del lists[seq][start:end]
        for i, expected in enumerate(lists):
            actual = [memory.cells[cell] for cell in table.of(i)]
            tokens = [one.token for one in expected]
            assert [cell and cell[0] for cell in actual] == tokens, f"sequence {i} after {name}"
        if name == "see":
            check_angles(table, memory, lists, [seq, (seq + a) % N_SEQ])
    check_angles(table, memory, lists, [0])
    check_angles(table, memory, lists, range(N_SEQ))


def check_angles(table, memory, lists, seq_ids) -> None:
    memory.run(table.due(np.array(seq_ids, np.int32)))
    assert table.due(np.array(seq_ids, np.int32)) is None, "rotated keys are due again"
    for i in seq_ids:
        actual, first = [memory.cells[cell] for cell in table.of(i)], table.first_angle(i)
        expected = [(one.token, first + next_position(lists[i][:p])) for p, one in enumerate(lists[i])]
        assert actual == expected, f"sequence {i}"


def test_a_token_attends_to_its_own_sequence_up_to_itself() -> None:
    table = CellTable(16, 2)
    table.append(np.array([0, 1, 0], np.int32), np.array([0, 0, 1], np.int32))
    table.fork(0, 1 - 0, 0)  # of no tokens: sequence 1 becomes empty
    distances = table.distances(np.array([0, 1, 0], np.int32), np.array([2, 0, 3], np.int32))
    visible = np.where(distances < 0, -1, distances)
    assert visible.tolist() == [[2, -1, 1, 0, -1, -1], [-1, -1, -1, -1, 0, -1], [3, -1, 2, 1, -1, 0]]


def test_cells_that_no_sequence_holds_any_more_are_not_read() -> None:
    table = CellTable(16, 2)
    table.append(np.array([0, 0, 1, 0], np.int32), np.array([0, 1, 0, 2], np.int32))
    sizes = [table.n_used]
    table.truncate(0, 2)
    sizes.append(table.n_used)
    table.drop(1)
    sizes.append(table.n_used)
    table.drop(0)
    assert [*sizes, table.n_used] == [4, 3, 2, 0]


@pytest.mark.parametrize(("start", "end", "n_rotated", "first"), [(0, 4, 0, 4), (2, 5, 2, 3), (9, 10, 2, 0)])
def test_a_cut_rotates_the_side_with_fewer_keys(start, end, n_rotated, first) -> None:
    table = CellTable(16, 2)
    table.append(np.zeros(12, np.int32), np.arange(12, dtype=np.int32))
    assert table.cut(0, start, end, end - start) is None
    assert (n_due(table), table.first_angle(0)) == (n_rotated, first)


def n_due(table) -> int:
    """The number of keys of sequence 0 that have to be rotated."""
    move = table.due(np.zeros(1, np.int32))
    return 0 if move is None else int(np.count_nonzero(move.delta))


def test_consecutive_cuts_rotate_keys_once() -> None:
    table = CellTable(16, 1)
    table.append(np.zeros(14, np.int32), np.arange(14, dtype=np.int32))
    for start in (8, 7, 6):
        assert table.cut(0, start, start + 1, 1) is None
    move = table.due(np.zeros(1, np.int32))
    assert move is not None
    assert (move.to, move.delta.tolist()) == (9, [-3] * 5)


def test_a_cut_rotates_copies_of_cells_that_a_fork_shares() -> None:
    table = CellTable(16, 2)
    table.append(np.zeros(8, np.int32), np.arange(8, dtype=np.int32))
    table.cut(0, 5, 6, 1)
    table.fork(0, 1, 7)
    move = table.cut(0, 1, 3, 2)
    assert move is not None
    assert (move.source.tolist(), move.to) == ([3, 4, 6, 7], 8)
    assert move.delta.tolist() == [-2, -2, -3, -3], "a copy is also rotated by the delta that was due for its source"
    assert table.due(np.zeros(1, np.int32)) is None
    due = table.due(np.ones(1, np.int32))
    assert due is not None
    assert (due.to, due.delta.tolist()) == (6, [-1, -1])


def test_keys_of_a_dropped_sequence_are_never_rotated() -> None:
    table = CellTable(16, 2)
    table.append(np.array([0] * 8 + [1] * 4, np.int32), np.arange(12, dtype=np.int32))
    table.cut(0, 4, 6, 2)
    assert table.due(np.array([1], np.int32)) is None, "the other sequence does not attend to them"
    table.drop(0)
    assert table.due(np.array([0, 1], np.int32)) is None


def test_a_cut_copies_no_cells_that_the_ledger_does_not_count() -> None:
    """The first tokens are shared: rotating them would take new cells. The later tokens are exclusive."""
    table = CellTable(12, 2)
    table.append(np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    table.fork(0, 1, 2)
    table.append(np.zeros(10, np.int32), np.arange(2, 12, dtype=np.int32))
    assert table.n_copied_by_cut(0, 2, 4, 2) == 0
    assert table.cut(0, 2, 4, 2) is None
    assert (n_due(table), table.first_angle(0)) == (8, 0)


def test_angles_stay_in_the_range_of_exact_sines() -> None:
    table = CellTable(12, 1)
    table.begin(0, FARTHEST)
    seq_ids = np.zeros(10, np.int32)
    table.append(seq_ids, np.arange(10, dtype=np.int32))
    assert table.cut(0, 0, 3, 3) is None
    move = table.due(seq_ids)
    assert move is not None
    assert (move.delta.tolist(), table.first_angle(0)) == ([-3] * 7, FARTHEST)
