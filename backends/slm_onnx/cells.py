"""Which cell of the KV cache holds which position of which sequences.

All sequences share one row of cells that is written from its start to its end. Forks share cells; what nobody holds
any more is given back at the end of the row, or when the row is compacted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of the cache to copy: ``cache[to + i] = rotate(cache[source[i]], by delta[i] positions)``.

    Attributes:
        source: cells [n].
        to: the first cell written.
        delta: int64 [n], how far each key's position moves.
    """

    source: Cells
    to: int
    delta: NDArray[np.int64]

    @property
    def stays(self) -> bool:
        """Whether every row is its own source, so that only keys change."""
        return bool((self.source == np.arange(self.to, self.to + len(self.source))).all())


class CellTable:
    """Positions and holders of cells. A method that returns a ``Move`` expects the caller to have it done.

    Args:
        n_cells: how many there are.
        n_seq_max: sequences.

    Attributes:
        n_used: cells from the start of the row that may be held; the next token goes there.
    """

    def __init__(self, n_cells: int, n_seq_max: int) -> None:
        self._positions = np.zeros(n_cells, np.int32)
        self._held = np.zeros((n_seq_max, n_cells), np.bool_)  # [sequence, cell]
        self.n_used = 0

    @property
    def n_cells(self) -> int:
        """Cells in all."""
        return len(self._positions)

    @property
    def n_idle(self) -> int:
        """Used cells that nobody holds."""
        return self.n_used - int(self._held[:, : self.n_used].any(axis=0).sum())

    def of(self, seq_id: int) -> Cells:
        """The cells of a sequence, by position."""
        cells = np.flatnonzero(self._held[seq_id, : self.n_used])
        return cells[np.argsort(self._positions[cells], kind="stable")]

    def distances(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """How far behind tokens that are about to be appended each cell lies.

        Args:
            seq_ids: of the tokens [n].
            positions: of the tokens [n].

        Returns:
            int32 [n, n_used + n]; below 0 where a token does not see a cell: it sees its own sequence's, up to itself.
        """
        n = self.n_used
        earlier = np.where(self._held[seq_ids, :n], positions[:, None] - self._positions[:n], -1)
        beside = np.where(seq_ids[:, None] == seq_ids, positions[:, None] - positions, -1)
        return np.concatenate([earlier, beside], axis=1)

    def append(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Tokens have been written after the used cells."""
        cells = np.arange(self.n_used, self.n_used + len(seq_ids))
        self._positions[cells] = positions
        self._held[seq_ids, cells] = True
        self.n_used += len(seq_ids)

    def fork(self, src: int, dst: int, end: int) -> None:
        """Let ``dst`` hold the cells of ``src[:end]``, too."""
        self._held[dst] = self._held[src] & (self._positions < end)

    def truncate(self, seq_id: int, length: int) -> None:
        """A sequence lets go of its cells from position ``length`` on."""
        self._held[seq_id] &= self._positions < length
        self._trim()

    def drop(self, seq_id: int) -> None:
        """A sequence lets go of all its cells."""
        self._held[seq_id] = False
        self._trim()

    def n_copied_by_cut(self, seq_id: int, end: int) -> int:
        """Cells that ``cut`` appends: those from ``end`` on that others hold, too."""
        return int(np.count_nonzero(self._moved(seq_id, end) & self._is_shared()))

    def cut(self, seq_id: int, start: int, end: int) -> list[Move]:
        """Forget [start, end) and move what follows down; cells that others hold, too, are copied to the end."""
        moved, delta = self._moved(seq_id, end), start - end
        shared, own = np.flatnonzero(moved & self._is_shared()), np.flatnonzero(moved & ~self._is_shared())
        moves = []
        self._held[seq_id] &= (self._positions < start) | (self._positions >= end)
        if len(shared):
            moves.append(Move(shared, self.n_used, np.full(len(shared), delta)))
            copies = np.arange(self.n_used, self.n_used + len(shared))
            self._positions[copies] = self._positions[shared] + delta
            self._held[seq_id, shared], self._held[seq_id, copies] = False, True
            self.n_used += len(shared)
        if len(own):
            first, last = int(own[0]), int(own[-1])
            turns = np.zeros(last - first + 1, np.int64)  # cells of others in between turn by nothing
            turns[own - first] = delta
            moves.append(Move(np.arange(first, last + 1), first, turns))
            self._positions[own] += delta
        self._trim()
        return moves

    def compact(self) -> Move | None:
        """Move all held cells to the start of the row; None where they are there."""
        held = np.flatnonzero(self._held[:, : self.n_used].any(axis=0))
        self.n_used = len(held)
        misplaced = np.flatnonzero(held != np.arange(len(held)))
        if not len(misplaced):
            return None
        first = int(misplaced[0])
        self._positions[: len(held)] = self._positions[held]
        self._held[:, : len(held)] = self._held[:, held]
        self._held[:, len(held) :] = False
        return Move(held[first:], first, np.zeros(len(held) - first, np.int64))

    def _moved(self, seq_id: int, end: int) -> NDArray[np.bool_]:
        moved: NDArray[np.bool_] = self._held[seq_id] & (self._positions >= end)
        return moved

    def _is_shared(self) -> NDArray[np.bool_]:
        shared: NDArray[np.bool_] = np.count_nonzero(self._held, axis=0) > 1
        return shared

    def _trim(self) -> None:
        held = np.flatnonzero(self._held[:, : self.n_used].any(axis=0))
        self.n_used = int(held[-1]) + 1 if len(held) else 0
