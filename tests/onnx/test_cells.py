"""The table of cells against lists: whatever is done, each sequence reads what a list of its own would hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_onnx.cells import FARTHEST, CellTable, Move

N_CELLS, N_SEQ = 24, 3


class Memory:
    """What a cache holds: each cell the token that was written there and the angle its key was rotated to."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, int] | None] = [None] * N_CELLS

    def run(self, move: Move | None) -> None:
        if move is None:
            return
        held = [self.cells[cell] for cell in move.source]
        for i, (cell, delta) in enumerate(zip(held, move.delta, strict=True)):
            self.cells[move.to + i] = None if cell is None else (cell[0], cell[1] + int(delta))


operation = st.tuples(
    st.sampled_from(["append", "append", "append", "fork", "truncate", "cut", "cut", "drop", "compact", "see"]),
    st.integers(0, N_SEQ - 1),
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),  # places that each of the tokens takes
)


class Held(NamedTuple):
    """A token, and how many places it takes."""

    token: int
    n_places: int


def place(held: list[Held]) -> int:
    """Of what comes behind these."""
    return sum(one.n_places for one in held)


@given(st.lists(operation, min_size=5, max_size=40))
@settings(max_examples=300, deadline=None)
def test_every_sequence_reads_what_a_list_would_hold(operations) -> None:
    table, memory = CellTable(N_CELLS, N_SEQ), Memory()
    lists: list[list[Held]] = [[] for _ in range(N_SEQ)]
    token = iter(range(10_000))
    for name, seq, a, b, places in operations:
        if name == "append":
            n = min(a, N_CELLS - table.n_used)
            new = [Held(next(token), n_places) for n_places in places[:n]]
            seq_ids = np.full(n, seq, np.int32)
            starts = np.array([place([*lists[seq], *new[:i]]) for i in range(n)], np.int64)
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
        elif name == "compact":
            memory.run(table.compact())
            assert table.n_idle == 0, "cells that nobody holds are left after a compaction"
        elif name == "cut":
            start, end = sorted((min(a, len(lists[seq])), min(b, len(lists[seq]))))
            taken = place(lists[seq][start:end])
            if start == end or table.n_used + table.n_copied_by_cut(seq, start, end, taken) > N_CELLS:
                continue
            memory.run(table.cut(seq, start, end, taken))
            del lists[seq][start:end]
        for i, wanted in enumerate(lists):
            found = [memory.cells[cell] for cell in table.of(i)]
            tokens = [one.token for one in wanted]
            assert [cell and cell[0] for cell in found] == tokens, f"sequence {i} after {name}"
        if name == "see":
            check_angles(table, memory, lists, [seq, (seq + a) % N_SEQ])
    check_angles(table, memory, lists, [0])
    check_angles(table, memory, lists, range(N_SEQ))


def check_angles(table, memory, lists, seq_ids) -> None:
    memory.run(table.due(np.array(seq_ids, np.int32)))
    assert table.due(np.array(seq_ids, np.int32)) is None, "keys that were turned are due again"
    for i in seq_ids:
        found, first = [memory.cells[cell] for cell in table.of(i)], table.first_angle(i)
        wanted = [(one.token, first + place(lists[i][:p])) for p, one in enumerate(lists[i])]
        assert found == wanted, f"sequence {i}"


def test_a_token_sees_its_own_sequence_up_to_itself() -> None:
    table = CellTable(16, 2)
    table.append(np.array([0, 1, 0], np.int32), np.array([0, 0, 1], np.int32))
    table.fork(0, 1 - 0, 0)  # of nothing: sequence 1 is emptied
    found = table.distances(np.array([0, 1, 0], np.int32), np.array([2, 0, 3], np.int32))
    far = np.where(found < 0, -1, found)
    assert far.tolist() == [[2, -1, 1, 0, -1, -1], [-1, -1, -1, -1, 0, -1], [3, -1, 2, 1, -1, 0]]


@pytest.mark.parametrize(("start", "end", "n_turned", "first"), [(0, 4, 0, 4), (2, 5, 2, 3), (9, 10, 2, 0)])
def test_a_cut_turns_the_side_with_fewer_keys(start, end, n_turned, first) -> None:
    table = CellTable(16, 2)
    table.append(np.zeros(12, np.int32), np.arange(12, dtype=np.int32))
    assert table.cut(0, start, end, end - start) is None
    assert (n_due(table), table.first_angle(0)) == (n_turned, first)


def n_due(table) -> int:
    """Keys of the first sequence that are not where they belong."""
    move = table.due(np.zeros(1, np.int32))
    return 0 if move is None else int(np.count_nonzero(move.delta))


def test_cuts_that_nobody_looks_between_turn_keys_once() -> None:
    table = CellTable(16, 1)
    table.append(np.zeros(14, np.int32), np.arange(14, dtype=np.int32))
    for start in (8, 7, 6):
        assert table.cut(0, start, start + 1, 1) is None
    move = table.due(np.zeros(1, np.int32))
    assert move is not None
    assert (move.to, move.delta.tolist()) == (9, [-3] * 5)


def test_a_cut_turns_copies_of_what_a_fork_holds() -> None:
    table = CellTable(16, 2)
    table.append(np.zeros(8, np.int32), np.arange(8, dtype=np.int32))
    table.cut(0, 5, 6, 1)
    table.fork(0, 1, 7)
    move = table.cut(0, 1, 3, 2)
    assert move is not None
    assert (move.source.tolist(), move.to) == ([3, 4, 6, 7], 8)
    assert move.delta.tolist() == [-2, -2, -3, -3], "a copy turns by what was due of its source, too"
    assert table.due(np.zeros(1, np.int32)) is None
    due = table.due(np.ones(1, np.int32))
    assert due is not None
    assert (due.to, due.delta.tolist()) == (6, [-1, -1])


def test_keys_of_a_sequence_that_is_dropped_are_never_turned() -> None:
    table = CellTable(16, 2)
    table.append(np.array([0] * 8 + [1] * 4, np.int32), np.arange(12, dtype=np.int32))
    table.cut(0, 4, 6, 2)
    assert table.due(np.array([1], np.int32)) is None, "the other sequence does not see them"
    table.drop(0)
    assert table.due(np.array([0, 1], np.int32)) is None


def test_a_cut_copies_nothing_that_the_ledger_does_not_reckon_with() -> None:
    """The first tokens are held twice: turning them would need cells, those behind are the sequence's own."""
    table = CellTable(12, 2)
    table.append(np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    table.fork(0, 1, 2)
    table.append(np.zeros(10, np.int32), np.arange(2, 12, dtype=np.int32))
    assert table.n_copied_by_cut(0, 2, 4, 2) == 0
    assert table.cut(0, 2, 4, 2) is None
    assert (n_due(table), table.first_angle(0)) == (8, 0)


def test_angles_that_sines_are_no_longer_right_for_are_not_reached() -> None:
    table = CellTable(12, 1)
    table.begin(0, FARTHEST)
    seq_ids = np.zeros(10, np.int32)
    table.append(seq_ids, np.arange(10, dtype=np.int32))
    assert table.cut(0, 0, 3, 3) is None
    move = table.due(seq_ids)
    assert move is not None
    assert (move.delta.tolist(), table.first_angle(0)) == ([-3] * 7, FARTHEST)
