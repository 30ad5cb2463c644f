"""The ledger compared with lists of objects: shared cells, free cells, and replays of edited histories."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.context.ledger import Ledger, replay_plan, truncated_edits
from slm_core.context.snapshot import Edit

N_CTX, N_SEQ = 48, 3


@dataclass(eq=False)
class Cell:
    """The KV cell of one position: its token, and the cells that the token attended to when it was decoded."""

    token: int
    saw: tuple[object, ...]

    @property
    def content(self) -> tuple[object, ...]:
        return (self.token, *self.saw)


@dataclass
class Model:
    """Sequences as lists of cells; a shared cell is one object in several lists."""

    share_forks: bool
    cells: list[list[Cell]] = field(default_factory=lambda: [[] for _ in range(N_SEQ)])

    @property
    def n_free(self) -> int:
        return N_CTX - len({id(cell) for cells in self.cells for cell in cells})

    def append(self, seq_id: int, tokens: list[int]) -> None:
        for token in tokens:
            self.cells[seq_id].append(Cell(token, (hash(tuple(cell.content for cell in self.cells[seq_id])),)))

    def fork(self, src: int, dst: int, end: int, n_copied: int) -> None:
        n_shared = end - n_copied if self.share_forks else 0
        copied = self.cells[src][:end]
        self.cells[dst] = copied[:n_shared] + [Cell(c.token, c.saw) for c in copied[n_shared:]]

    def cut(self, seq_id: int, start: int, end: int) -> None:
        """Cells shared with other sequences are copied before they move; all others move in place."""
        others = {id(cell) for s, cells in enumerate(self.cells) if s != seq_id for cell in cells}
        cells = self.cells[seq_id]
        moved = [Cell(c.token, c.saw) if id(c) in others else c for c in cells[end:]]
        self.cells[seq_id] = cells[:start] + moved


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "fork", "truncate", "cut", "cut", "drop"]),
        st.integers(0, N_SEQ - 1),
        st.integers(0, 2**16),
        st.integers(0, 2**16),
    ),
    min_size=20,  # hypothesis would mostly draw short lists, without a cut of a fork
    max_size=40,
)


def apply_step(ledger: Ledger, model: Model, step: tuple[str, int, int, int]) -> None:
    """Apply one step to both, if a context would allow it."""
    kind, seq_id, a, b = step
    length, free = ledger.length(seq_id), ledger.n_free
    if kind == "append":
        tokens = [(a + 7 * i) % 11 for i in range(min(1 + b % 9, free))]
        ledger.append(seq_id, tokens)
        model.append(seq_id, tokens)
    elif kind == "fork":
        dst, end = a % N_SEQ, b % (length + 1)
        n_copied = a // N_SEQ % (end + 1) if a % 2 else 0
        if dst != seq_id and not ledger.length(dst) and ledger.fork_cost(end, n_copied) <= free:
            predicted = free - ledger.fork_cost(end, n_copied)
            ledger.fork(seq_id, dst, end, n_copied)
            model.fork(seq_id, dst, end, n_copied)
            assert ledger.n_free == predicted, "fork_cost returned another number"
    elif kind == "truncate":
        ledger.truncate(seq_id, a % (length + 1))
        del model.cells[seq_id][a % (length + 1) :]
    elif kind == "cut":
        start, end = sorted((a % (length + 1), b % (length + 1)))
        if start < end < length and ledger.cut_cost(seq_id, start, end) <= free:
            predicted = free - ledger.cut_cost(seq_id, start, end)
            ledger.cut(seq_id, start, end)
            model.cut(seq_id, start, end)
            assert ledger.n_free == predicted, "cut_cost returned another number"
    else:
        ledger.drop(seq_id)
        model.cells[seq_id] = []


@given(STEPS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_cells_are_shared_and_freed_like_objects(steps, share_forks):
    ledger, model = Ledger(N_CTX, N_SEQ, share_forks=share_forks), Model(share_forks)
    for step in steps:
        apply_step(ledger, model, step)
        assert ledger.n_free == model.n_free
        pairs = [
            (cell, id(obj))
            for seq_id in range(N_SEQ)
            for cell, obj in zip(ledger.cells(seq_id).tolist(), model.cells[seq_id], strict=True)
        ]
        # Two cells have the same number if and only if they are the same object.
        assert len(set(pairs)) == len({cell for cell, _ in pairs}) == len({obj for _, obj in pairs})
        for seq_id in range(N_SEQ):
            assert list(ledger.inputs(seq_id)) == [cell.token for cell in model.cells[seq_id]]
            others = {id(c) for s, cells in enumerate(model.cells) if s != seq_id for c in cells}
            exclusive = [cell for cell in model.cells[seq_id] if id(cell) not in others]
            assert ledger.n_exclusive(seq_id) == len(exclusive)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_a_replay_of_the_history_gives_the_same_cells(steps):
    ledger, model = Ledger(N_CTX, N_SEQ, share_forks=True), Model(share_forks=True)
    for step in steps:
        apply_step(ledger, model, step)
    for seq_id in range(N_SEQ):
        edits = ledger.edits(seq_id)
        runs, peak = replay_plan(list(ledger.inputs(seq_id)), edits)
        replayed, lengths = Model(share_forks=True), [0]
        for run, edit in itertools.zip_longest(runs, edits):
            replayed.append(0, run)
            lengths.append(len(replayed.cells[0]))
            if edit is not None:
                assert [c.token for c in replayed.cells[0][edit.start : edit.end]] == list(edit.removed)
                replayed.cut(0, edit.start, edit.end)
        assert [c.content for c in replayed.cells[0]] == [c.content for c in model.cells[seq_id]]
        assert peak == max(lengths)


def test_a_cut_at_the_end_leaves_no_edit_in_the_history():
    edits = [Edit(2, (7, 8), 9)]
    assert truncated_edits(edits, 2) == []
    assert truncated_edits(edits, 3) == [Edit(2, (7, 8), 5)]
    assert truncated_edits(edits, 9) == edits


def test_a_restored_history_is_kept():
    ledger = Ledger(16, 1, share_forks=True)
    ledger.append(0, [1, 2, 3])
    ledger.set_edits(0, [Edit(1, (9,), 4)])
    assert ledger.edits(0) == (Edit(1, (9,), 4),)
    ledger.drop(0)
    assert ledger.edits(0) == ()
    assert ledger.n_free == 16


@pytest.mark.parametrize("share_forks", [True, False])
def test_cells_are_numbers_below_n_ctx(share_forks):
    ledger = Ledger(12, 3, share_forks=share_forks)
    ledger.append(0, range(5))
    ledger.fork(0, 1, 4)
    ledger.append(2, range(3))
    cells = np.concatenate([ledger.cells(s) for s in range(3)])
    assert cells.min() >= 0
    assert cells.max() < 12
    assert len(np.unique(cells)) == (8 if share_forks else 12)


@pytest.mark.parametrize("seq_id", range(N_SEQ))
def test_a_cut_keeps_the_cells_of_the_remaining_tokens(seq_id):
    ledger = Ledger(N_CTX, N_SEQ, share_forks=True)
    ledger.append(seq_id, range(10))
    cells = ledger.cells(seq_id).tolist()
    ledger.cut(seq_id, 2, 5)
    assert ledger.cells(seq_id).tolist() == cells[:2] + cells[5:]
    assert ledger.n_free == N_CTX - 7
