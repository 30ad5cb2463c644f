"""The table of cells against lists: whatever is done, each sequence reads what a list of its own would hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_onnx.cells import CellTable, Move

N_CELLS, N_SEQ = 24, 3


class Memory:
    """What a cache holds: each cell the token that was written there and the position its key was rotated to."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, int] | None] = [None] * N_CELLS

    def run(self, move: Move | None) -> None:
        if move is None:
            return
        held = [self.cells[cell] for cell in move.source]
        for i, (cell, delta) in enumerate(zip(held, move.delta, strict=True)):
            self.cells[move.to + i] = None if cell is None else (cell[0], cell[1] + int(delta))


operation = st.tuples(
    st.sampled_from(["append", "append", "append", "fork", "truncate", "cut", "drop", "compact"]),
    st.integers(0, N_SEQ - 1),
    st.integers(0, 8),
    st.integers(0, 8),
)


@given(st.lists(operation, min_size=5, max_size=40))
@settings(max_examples=300, deadline=None)
def test_every_sequence_reads_what_a_list_would_hold(operations) -> None:
    table, memory, lists = CellTable(N_CELLS, N_SEQ), Memory(), [[] for _ in range(N_SEQ)]
    token = iter(range(10_000))
    for name, seq, a, b in operations:
        if name == "append":
            n = min(a, N_CELLS - table.n_used)
            new = [next(token) for _ in range(n)]
            positions = np.arange(len(lists[seq]), len(lists[seq]) + n, dtype=np.int32)
            for i, (t, p) in enumerate(zip(new, positions, strict=True)):
                memory.cells[table.n_used + i] = (t, int(p))
            table.append(np.full(n, seq, np.int32), positions)
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
        else:
            start, end = sorted((min(a, len(lists[seq])), min(b, len(lists[seq]))))
            if start == end or table.n_used + table.n_copied_by_cut(seq, end) > N_CELLS:
                continue
            for move in table.cut(seq, start, end):
                memory.run(move)
            del lists[seq][start:end]
        for i, wanted in enumerate(lists):
            found = [memory.cells[cell] for cell in table.of(i)]
            assert found == [(t, p) for p, t in enumerate(wanted)], f"sequence {i} after {name}"


def test_a_token_sees_its_own_sequence_up_to_itself() -> None:
    table = CellTable(16, 2)
    table.append(np.array([0, 1, 0], np.int32), np.array([0, 0, 1], np.int32))
    table.fork(0, 1 - 0, 0)  # of nothing: sequence 1 is emptied
    found = table.distances(np.array([0, 1, 0], np.int32), np.array([2, 0, 3], np.int32))
    far = np.where(found < 0, -1, found)
    assert far.tolist() == [[2, -1, 1, 0, -1, -1], [-1, -1, -1, -1, 0, -1], [3, -1, 2, 1, -1, 0]]
