"""The table of KV cache cells: the position and the sequences of each cell.

All sequences share one row of cells, which is filled from its start. Forks share cells. A cell that no sequence holds
is free again if it is at the end of the row, or after ``compact``.

A key is rotated to an angle, counted in M-RoPE positions. Attention depends only on differences between angles, so a
sequence need not begin at angle 0. A cut rotates the side with fewer keys: keys before the gap up, or keys after it
down. The table only records the rotations that are pending; ``due`` returns them before the keys are next read, once
for all cuts so far. The attention mask depends on indices: positions, counted from any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.intp]
FARTHEST = 1 << 30
"""The largest angle of a sequence's start: sines and cosines in float64 are then accurate to 2^-23."""


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of the cache to copy: ``cache[to + i] = rotate(cache[source[i]], by delta[i])``.

    Attributes:
        source: cells [n].
        to: the first cell written.
        delta: int64 [n], the rotation of each key, in M-RoPE positions.
    """

    source: Cells
    to: int
    delta: NDArray[np.int64]

    @property
    def stays(self) -> bool:
        """Whether every row is its own source, so that only keys change."""
        return bool((self.source == np.arange(self.to, self.to + len(self.source))).all())

    def pieces(self, n: int) -> Iterator[Move]:
        """Moves of ``n`` rows each, for a move that only changes keys; pieces without rotation are left out."""
        for start in range(0, len(self.source), n):
            rows = slice(start, start + n)
            if self.delta[rows].any():
                yield Move(self.source[rows], self.to + start, self.delta[rows])


class Holding(NamedTuple):
    """The table's entries of one sequence.

    Attributes:
        cells: whether the sequence holds each cell [n_cells].
        first_index: index of position 0.
        first_angle: angle of M-RoPE position 0.
        n_used: number of cells in use.
    """

    cells: NDArray[np.bool_]
    first_index: int
    first_angle: int
    n_used: int


class CellTable:
    """Indices of cells, and the sequences that hold them. The caller must carry out every ``Move`` that it gets.

    Args:
        n_cells: number of cells.
        n_seq_max: number of sequences.

    Attributes:
        n_used: number of cells in use, from the start of the row; the next token goes there.
    """

    def __init__(self, n_cells: int, n_seq_max: int) -> None:
        self._indices = np.zeros(n_cells, np.int32)  # index of each cell
        self._pending = np.zeros(n_cells, np.int64)  # pending rotation of each cell's key
        self._first_indices = np.zeros(n_seq_max, np.int32)  # index of each sequence's position 0
        self._first_angles = np.zeros(n_seq_max, np.int64)  # angle of each sequence's M-RoPE position 0
        self._held = np.zeros((n_seq_max, n_cells), np.bool_)  # [sequence, cell]
        self.n_used = 0

    @property
    def n_cells(self) -> int:
        """The number of cells."""
        return len(self._indices)

    @property
    def n_idle(self) -> int:
        """The number of cells in use that no sequence holds."""
        return self.n_used - int(self._held[:, : self.n_used].any(axis=0).sum())

    def of(self, seq_id: int) -> Cells:
        """The cells of a sequence, sorted by position."""
        cells = np.flatnonzero(self._held[seq_id, : self.n_used])
        return cells[np.argsort(self._indices[cells], kind="stable")]

    def first_angle(self, seq_id: int) -> int:
        """The angle of a sequence's M-RoPE position 0."""
        return int(self._first_angles[seq_id])

    def begin(self, seq_id: int, first_angle: int) -> None:
        """Let an empty sequence begin at an angle and at index 0; an earlier cut may have changed both."""
        self._first_indices[seq_id], self._first_angles[seq_id] = 0, first_angle

    def exchange(self, seq_id: int, first_angle: int, n: int, shared: tuple[int, int] | None = None) -> None:
        """Replace the cells of a sequence by the ``n`` next free cells.

        Args:
            seq_id: the sequence.
            first_angle: angle of its M-RoPE position 0, unless ``shared`` is given.
            n: number of cells.
            shared: a sequence and the number of its first cells to share, before the new cells.
        """
        cells, start = np.arange(self.n_used, self.n_used + n), 0
        if shared is None:
            self._held[seq_id] = False
            self.begin(seq_id, first_angle)
        else:
            src, start = shared
            self.fork(src, seq_id, start)
        self._indices[cells] = self._first_indices[seq_id] + np.arange(start, start + n)
        self._pending[cells] = 0
        self._held[seq_id, cells] = True
        self.n_used += n

    def holding(self, seq_id: int) -> Holding:
        """The entries of a sequence, for ``hold`` after a failed ``exchange``."""
        return Holding(
            self._held[seq_id].copy(), int(self._first_indices[seq_id]), int(self._first_angles[seq_id]), self.n_used
        )

    def hold(self, seq_id: int, holding: Holding) -> None:
        """Restore the entries of a sequence from before an ``exchange``. There must be no other change in between."""
        self._held[seq_id], self.n_used = holding.cells, holding.n_used
        self._first_indices[seq_id], self._first_angles[seq_id] = holding.first_index, holding.first_angle

    def indices(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """The indices of positions [n] in sequences [n]."""
        cell_positions: NDArray[np.int32] = positions + self._first_indices[seq_ids]
        return cell_positions

    def angles(self, seq_ids: NDArray[np.int32], mrope_positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The angles of M-RoPE positions [n], or [n, 3], in sequences [n]."""
        angle_indices: NDArray[np.int64] = (mrope_positions.T + self._first_angles[seq_ids]).T
        return angle_indices

    def distances(self, seq_ids: NDArray[np.int32], indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """The distance from each cell to each new token.

        Args:
            seq_ids: sequences of the tokens [n].
            indices: indices of the tokens [n].

        Returns:
            int32 [n, n_used + n]; negative if the token does not attend to the cell (another sequence's, or later).
        """
        n = self.n_used
        earlier = np.where(self._held[seq_ids, :n], indices[:, None] - self._indices[:n], -1)
        in_batch = np.where(seq_ids[:, None] == seq_ids, indices[:, None] - indices, -1)
        return np.concatenate([earlier, in_batch], axis=1)

    def append(self, seq_ids: NDArray[np.int32], indices: NDArray[np.int32]) -> None:
        """Record tokens that were written after the cells in use, with keys rotated to their angles."""
        cells = np.arange(self.n_used, self.n_used + len(seq_ids))
        self._indices[cells], self._pending[cells] = indices, 0
        self._held[seq_ids, cells] = True
        self.n_used += len(seq_ids)

    def fork(self, src: int, dst: int, end: int) -> None:
        """Let ``dst`` share the cells of ``src[:end]``."""
        self._held[dst] = self._before(src, end)
        self._first_indices[dst], self._first_angles[dst] = self._first_indices[src], self._first_angles[src]

    def truncate(self, seq_id: int, length: int) -> None:
        """Release the cells of a sequence from position ``length`` on."""
        self._held[seq_id] = self._before(seq_id, length)
        self._trim()

    def drop(self, seq_id: int) -> None:
        """Release all cells of a sequence."""
        self._held[seq_id] = False
        self._first_indices[seq_id] = self._first_angles[seq_id] = 0
        self._trim()

    def n_copied_by_cut(self, seq_id: int, start: int, end: int, n_mrope_positions: int) -> int:
        """The number of cells that ``cut`` appends: copies of shared cells that it rotates."""
        rotated, *_ = self._cells_to_rotate(seq_id, start, end, n_mrope_positions)
        return int(np.count_nonzero(rotated & self._is_shared()))

    def cut(self, seq_id: int, start: int, end: int, n_mrope_positions: int) -> Move | None:
        """Remove [start, end), which has ``n_mrope_positions``, and close the gap.

        Shared cells that need a rotation are copied to the end of the row.
        """
        rotated, step, rotation = self._cells_to_rotate(seq_id, start, end, n_mrope_positions)
        is_shared = self._is_shared()
        self._held[seq_id] = self._before(seq_id, start) | self._from(seq_id, end)
        self._indices[rotated & ~is_shared] += step
        self._pending[rotated & ~is_shared] += rotation
        copy = self._copied_apart(seq_id, np.flatnonzero(rotated & is_shared), step, rotation)
        if step > 0:
            self._first_indices[seq_id] += step
            self._first_angles[seq_id] += rotation
        self._trim()
        return copy

    def _copied_apart(self, seq_id: int, shared: Cells, step: int, rotation: int) -> Move | None:
        """Replace shared cells of a sequence by copies, ``step`` indices further on, rotated by ``rotation``."""
        if not len(shared):
            return None
        copies = np.arange(self.n_used, self.n_used + len(shared))
        self._indices[copies], self._pending[copies] = self._indices[shared] + step, 0
        self._held[seq_id, shared], self._held[seq_id, copies] = False, True
        self.n_used += len(shared)
        return Move(shared, int(copies[0]), self._pending[shared] + rotation)

    def due(self, seq_ids: NDArray[np.int32]) -> Move | None:
        """The pending rotations of these sequences; None if there are none."""
        used = slice(0, self.n_used)
        rotated = np.flatnonzero(self._held[np.unique(seq_ids), used].any(axis=0) & (self._pending[used] != 0))
        if not len(rotated):
            return None
        first, last = int(rotated[0]), int(rotated[-1])
        deltas = np.zeros(last - first + 1, np.int64)  # 0 for cells of other sequences in between
        deltas[rotated - first] = self._pending[rotated]
        self._pending[rotated] = 0
        return Move(np.arange(first, last + 1), first, deltas)

    def compact(self) -> Move | None:
        """Move all held cells to the start of the row, with keys rotated; None if they are already there."""
        held = np.flatnonzero(self._held[:, : self.n_used].any(axis=0))
        self.n_used = len(held)
        misplaced = np.flatnonzero(held != np.arange(len(held)))
        if not len(misplaced):
            return None
        first = int(misplaced[0])
        move = Move(held[first:], first, self._pending[held[first:]])
        self._indices[: len(held)], self._pending[first : len(held)] = self._indices[held], 0
        self._held[:, : len(held)] = self._held[:, held]
        self._held[:, len(held) :] = False
        return move

    def _cells_to_rotate(
        self, seq_id: int, start: int, end: int, n_mrope_positions: int
    ) -> tuple[NDArray[np.bool_], int, int]:
        """The cells that a cut rotates (the side with fewer cells), the change of their indices, and their rotation.

        Cells before the gap are rotated only if no other sequence holds any of them: a cut must not need more cells
        than a rotation of the cells after the gap needs, which is the ledger's bound.
        """
        before, after = self._before(seq_id, start), self._from(seq_id, end)
        fewer = np.count_nonzero(before) < np.count_nonzero(after)
        farthest = max(self._first_indices[seq_id] + end - start, self._first_angles[seq_id] + n_mrope_positions)
        if fewer and farthest <= FARTHEST and not (before & self._is_shared()).any():
            return before, end - start, n_mrope_positions
        return after, start - end, -n_mrope_positions

    def _before(self, seq_id: int, position: int) -> NDArray[np.bool_]:
        before: NDArray[np.bool_] = self._held[seq_id] & (self._indices < self._first_indices[seq_id] + position)
        return before

    def _from(self, seq_id: int, position: int) -> NDArray[np.bool_]:
        after: NDArray[np.bool_] = self._held[seq_id] & (self._indices >= self._first_indices[seq_id] + position)
        return after

    def _is_shared(self) -> NDArray[np.bool_]:
        shared: NDArray[np.bool_] = np.count_nonzero(self._held, axis=0) > 1
        return shared

    def _trim(self) -> None:
        held = np.flatnonzero(self._held[:, : self.n_used].any(axis=0))
        self.n_used = int(held[-1]) + 1 if len(held) else 0
