"""The cells of the KV cache, and the positions and sequences that they hold.

All sequences share one row of cells that is written from its start to its end. Forks share cells; what nobody holds
any more is given back at the end of the row, or when the row is compacted.

A key is rotated to an angle, counted in places, which are positions but behind and among rows in a grid. Only
differences between angles matter, so a sequence need not begin at angle 0: a cut turns whichever side has fewer keys,
those before the gap up or those behind it down. It only notes how far: they are turned when somebody is to see them
(``due``), once for all cuts until then. Who sees whom goes by indices: positions, counted from any number likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.intp]
FARTHEST = 1 << 30
"""The largest angle that a sequence begins at: sines and cosines, made in float64, are then right to 2^-23."""


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of the cache to copy: ``cache[to + i] = rotate(cache[source[i]], by delta[i])``.

    Attributes:
        source: cells [n].
        to: the first cell written.
        delta: int64 [n], how far each key turns, in places.
    """

    source: Cells
    to: int
    delta: NDArray[np.int64]

    @property
    def stays(self) -> bool:
        """Whether every row is its own source, so that only keys change."""
        return bool((self.source == np.arange(self.to, self.to + len(self.source))).all())

    def pieces(self, n: int) -> Iterator[Move]:
        """The same for ``n`` rows at a time, where every row is its own source; rows that do not turn are left out."""
        for start in range(0, len(self.source), n):
            rows = slice(start, start + n)
            if self.delta[rows].any():
                yield Move(self.source[rows], self.to + start, self.delta[rows])


class Holding(NamedTuple):
    """What a table of cells knows of one sequence.

    Attributes:
        cells: whether it holds each cell [n_cells].
        first_index: of its position 0.
        first_angle: of its place 0.
        n_used: cells of the table that may be held.
    """

    cells: NDArray[np.bool_]
    first_index: int
    first_angle: int
    n_used: int


class CellTable:
    """Indices and holders of cells. A method that returns a ``Move`` expects the caller to have it done.

    Args:
        n_cells: how many there are.
        n_seq_max: sequences.

    Attributes:
        n_used: cells from the start of the row that may be held; the next token goes there.
    """

    def __init__(self, n_cells: int, n_seq_max: int) -> None:
        self._indices = np.zeros(n_cells, np.int32)  # of each cell's token
        self._turns = np.zeros(n_cells, np.int64)  # how far its key is to turn yet
        self._first_indices = np.zeros(n_seq_max, np.int32)  # of each sequence's position 0
        self._first_angles = np.zeros(n_seq_max, np.int64)  # of each sequence's place 0
        self._held = np.zeros((n_seq_max, n_cells), np.bool_)  # [sequence, cell]
        self.n_used = 0

    @property
    def n_cells(self) -> int:
        """Cells in all."""
        return len(self._indices)

    @property
    def n_idle(self) -> int:
        """Used cells that nobody holds."""
        return self.n_used - int(self._held[:, : self.n_used].any(axis=0).sum())

    def of(self, seq_id: int) -> Cells:
        """The cells of a sequence, by position."""
        cells = np.flatnonzero(self._held[seq_id, : self.n_used])
        return cells[np.argsort(self._indices[cells], kind="stable")]

    def first_angle(self, seq_id: int) -> int:
        """The angle of a sequence's place 0."""
        return int(self._first_angles[seq_id])

    def begin(self, seq_id: int, first_angle: int) -> None:
        """Let an empty sequence begin at an angle, and at index 0: an earlier cut may have moved both."""
        self._first_indices[seq_id], self._first_angles[seq_id] = 0, first_angle

    def exchange(self, seq_id: int, first_angle: int, n: int, shared: tuple[int, int] | None = None) -> None:
        """A sequence lets go of its cells, and holds the ``n`` after the used ones.

        Args:
            seq_id: the sequence.
            first_angle: of its place 0, where it shares nothing.
            n: cells.
            shared: a sequence whose first cells it holds, too, and how many, before the others.
        """
        cells, start = np.arange(self.n_used, self.n_used + n), 0
        if shared is None:
            self._held[seq_id] = False
            self.begin(seq_id, first_angle)
        else:
            src, start = shared
            self.fork(src, seq_id, start)
        self._indices[cells] = self._first_indices[seq_id] + np.arange(start, start + n)
        self._turns[cells] = 0
        self._held[seq_id, cells] = True
        self.n_used += n

    def holding(self, seq_id: int) -> Holding:
        """What a sequence holds, for ``hold`` after an ``exchange`` that failed."""
        return Holding(
            self._held[seq_id].copy(), int(self._first_indices[seq_id]), int(self._first_angles[seq_id]), self.n_used
        )

    def hold(self, seq_id: int, holding: Holding) -> None:
        """Let a sequence hold what it held; ``exchange`` was called since, perhaps in vain, and nothing else."""
        self._held[seq_id], self.n_used = holding.cells, holding.n_used
        self._first_indices[seq_id], self._first_angles[seq_id] = holding.first_index, holding.first_angle

    def indices(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """The indices of positions [n] in sequences [n]."""
        cell_positions: NDArray[np.int32] = positions + self._first_indices[seq_ids]
        return cell_positions

    def angles(self, seq_ids: NDArray[np.int32], places: NDArray[np.integer]) -> NDArray[np.int64]:
        """The angles of places [n], or [n, 3], in sequences [n]."""
        angle_indices: NDArray[np.int64] = (places.T + self._first_angles[seq_ids]).T
        return angle_indices

    def distances(self, seq_ids: NDArray[np.int32], indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """The distance of each cell before tokens that are about to be appended.

        Args:
            seq_ids: of the tokens [n].
            indices: of the tokens [n].

        Returns:
            int32 [n, n_used + n]; below 0 where a token does not see a cell: it sees its own sequence's, up to itself.
        """
        n = self.n_used
        earlier = np.where(self._held[seq_ids, :n], indices[:, None] - self._indices[:n], -1)
        in_batch = np.where(seq_ids[:, None] == seq_ids, indices[:, None] - indices, -1)
        return np.concatenate([earlier, in_batch], axis=1)

    def append(self, seq_ids: NDArray[np.int32], indices: NDArray[np.int32]) -> None:
        """Tokens have been written after the used cells, with keys rotated to their angles."""
        cells = np.arange(self.n_used, self.n_used + len(seq_ids))
        self._indices[cells], self._turns[cells] = indices, 0
        self._held[seq_ids, cells] = True
        self.n_used += len(seq_ids)

    def fork(self, src: int, dst: int, end: int) -> None:
        """Let ``dst`` hold the cells of ``src[:end]``, too."""
        self._held[dst] = self._before(src, end)
        self._first_indices[dst], self._first_angles[dst] = self._first_indices[src], self._first_angles[src]

    def truncate(self, seq_id: int, length: int) -> None:
        """A sequence lets go of its cells from position ``length`` on."""
        self._held[seq_id] = self._before(seq_id, length)
        self._trim()

    def drop(self, seq_id: int) -> None:
        """A sequence lets go of all its cells."""
        self._held[seq_id] = False
        self._first_indices[seq_id] = self._first_angles[seq_id] = 0
        self._trim()

    def n_copied_by_cut(self, seq_id: int, start: int, end: int, n_mrope_positions: int) -> int:
        """Cells that ``cut`` appends: copies of shared cells that it rotates."""
        turned, *_ = self._turned(seq_id, start, end, n_mrope_positions)
        return int(np.count_nonzero(turned & self._is_shared()))

    def cut(self, seq_id: int, start: int, end: int, n_mrope_positions: int) -> Move | None:
        """Forget [start, end), which take ``n_mrope_positions``, and close the gap.

        Cells to turn that others hold, too, are copied to the end.
        """
        turned, step, turn = self._turned(seq_id, start, end, n_mrope_positions)
        is_shared = self._is_shared()
        self._held[seq_id] = self._before(seq_id, start) | self._from(seq_id, end)
        self._indices[turned & ~is_shared] += step
        self._turns[turned & ~is_shared] += turn
        copy = self._copied_apart(seq_id, np.flatnonzero(turned & is_shared), step, turn)
        if step > 0:
            self._first_indices[seq_id] += step
            self._first_angles[seq_id] += turn
        self._trim()
        return copy

    def _copied_apart(self, seq_id: int, shared: Cells, step: int, turn: int) -> Move | None:
        """Let a sequence have cells for itself, ``step`` further on, their keys turned by ``turn`` more."""
        if not len(shared):
            return None
        copies = np.arange(self.n_used, self.n_used + len(shared))
        self._indices[copies], self._turns[copies] = self._indices[shared] + step, 0
        self._held[seq_id, shared], self._held[seq_id, copies] = False, True
        self.n_used += len(shared)
        return Move(shared, int(copies[0]), self._turns[shared] + turn)

    def due(self, seq_ids: NDArray[np.int32]) -> Move | None:
        """Rotate all keys of these sequences to their angles; None if nothing is pending."""
        used = slice(0, self.n_used)
        turned = np.flatnonzero(self._held[np.unique(seq_ids), used].any(axis=0) & (self._turns[used] != 0))
        if not len(turned):
            return None
        first, last = int(turned[0]), int(turned[-1])
        turns = np.zeros(last - first + 1, np.int64)  # cells of others in between turn by nothing
        turns[turned - first] = self._turns[turned]
        self._turns[turned] = 0
        return Move(np.arange(first, last + 1), first, turns)

    def compact(self) -> Move | None:
        """Move all held cells to the start of the row, with keys rotated; None if they are there."""
        held = np.flatnonzero(self._held[:, : self.n_used].any(axis=0))
        self.n_used = len(held)
        misplaced = np.flatnonzero(held != np.arange(len(held)))
        if not len(misplaced):
            return None
        first = int(misplaced[0])
        move = Move(held[first:], first, self._turns[held[first:]])
        self._indices[: len(held)], self._turns[first : len(held)] = self._indices[held], 0
        self._held[:, : len(held)] = self._held[:, held]
        self._held[:, len(held) :] = False
        return move

    def _turned(self, seq_id: int, start: int, end: int, n_mrope_positions: int) -> tuple[NDArray[np.bool_], int, int]:
        """The cells that a cut turns, how many indices further on they are then, and how far: the side with fewer.

        Those before the gap only where no other sequence holds any: a cut must not need more room than one that turns
        what is behind it, which is what the ledger reckons with.
        """
        before, behind = self._before(seq_id, start), self._from(seq_id, end)
        fewer = np.count_nonzero(before) < np.count_nonzero(behind)
        farthest = max(self._first_indices[seq_id] + end - start, self._first_angles[seq_id] + n_mrope_positions)
        if fewer and farthest <= FARTHEST and not (before & self._is_shared()).any():
            return before, end - start, n_mrope_positions
        return behind, start - end, -n_mrope_positions

    def _before(self, seq_id: int, position: int) -> NDArray[np.bool_]:
        before: NDArray[np.bool_] = self._held[seq_id] & (self._indices < self._first_indices[seq_id] + position)
        return before

    def _from(self, seq_id: int, position: int) -> NDArray[np.bool_]:
        behind: NDArray[np.bool_] = self._held[seq_id] & (self._indices >= self._first_indices[seq_id] + position)
        return behind

    def _is_shared(self) -> NDArray[np.bool_]:
        shared: NDArray[np.bool_] = np.count_nonzero(self._held, axis=0) > 1
        return shared

    def _trim(self) -> None:
        held = np.flatnonzero(self._held[:, : self.n_used].any(axis=0))
        self.n_used = int(held[-1]) + 1 if len(held) else 0
