"""The ledger of a context: the inputs of each sequence, its edits, and its cells of the KV cache.

Inputs are ``Held`` values: token ids, and records for embedding rows and tokens in bidirectional blocks.

A cell is the KV storage of one position. A context has ``n_ctx`` cells. A fork shares the cells of its source until one
of the two changes. A backend can use the numbers of cells as rows of its buffers, or ignore them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held
from slm_core.context.snapshot import Edit


class SequenceRecord:
    """One sequence: its inputs, the cell of each, and its cuts."""

    __slots__ = ("cells", "edits", "inputs")

    def __init__(self, inputs: Iterable[Held] = (), cells: Iterable[int] = (), edits: Iterable[Edit] = ()) -> None:
        self.inputs = list(inputs)
        self.cells = list(cells)
        self.edits = list(edits)


class LedgerState(NamedTuple):
    """The state of a ledger. Its records must not be changed."""

    sequences: list[SequenceRecord]
    references: NDArray[np.int32]
    n_untouched: int
    n_touched: int
    released: list[int]
    revisions: list[int]
    reserved: dict[int, int]


class Ledger:
    """The bookkeeping of a context. Callers check arguments and room; these methods do not raise.

    Args:
        n_ctx: the number of cells.
        n_seq_max: the number of sequences.
        share_forks: whether a fork shares cells; else it takes new cells.
    """

    def __init__(self, n_ctx: int, n_seq_max: int, *, share_forks: bool) -> None:
        self._sequences = [SequenceRecord() for _ in range(n_seq_max)]
        # Cells are numbered at their first use, so a large n_ctx takes no memory until then.
        self._references = np.zeros(min(n_ctx, 256), np.int32)
        self._n_untouched = n_ctx
        self._n_touched = 0
        self._released: list[int] = []
        self._share_forks = share_forks
        self._revisions = [0] * n_seq_max
        self._reserved: dict[int, int] = {}  # cells of sequences that are being restored
        self._n_unshared: dict[int, int] = {}  # by sequence: its number of unshared cells, if it is counted already

    def clear(self) -> None:
        """Record that all sequences were dropped, and free the memory of the ledger."""
        self._sequences = [SequenceRecord() for _ in self._sequences]
        self._n_untouched += self._n_touched
        self._n_touched, self._released, self._reserved, self._n_unshared = 0, [], {}, {}
        self._references = np.zeros(min(self._n_untouched, 256), np.int32)

    @property
    def n_free(self) -> int:
        """The number of free cells."""
        return self._n_untouched + len(self._released) - sum(self._reserved.values())

    def length(self, seq_id: int) -> int:
        """The number of tokens of a sequence."""
        return len(self._sequences[seq_id].inputs)

    def lengths(self) -> dict[int, int]:
        """The number of tokens of each sequence."""
        return {seq_id: len(record.inputs) for seq_id, record in enumerate(self._sequences)}

    def references(self) -> NDArray[np.int32]:
        """The number of sequences that use each cell, without cells that were never used; a copy."""
        return self._references[: self._n_touched].copy()

    def inputs(self, seq_id: int) -> Sequence[Held]:
        """The inputs of a sequence; not a copy."""
        return self._sequences[seq_id].inputs

    def cells(self, seq_id: int) -> NDArray[np.int32]:
        """The cell of each position, int32 [S]."""
        return np.array(self._sequences[seq_id].cells, np.int32)

    def edits(self, seq_id: int) -> tuple[Edit, ...]:
        """The cuts of a sequence, oldest first."""
        return tuple(self._sequences[seq_id].edits)

    def revision(self, seq_id: int) -> int:
        """A number that changes with each change of the sequence."""
        return self._revisions[seq_id]

    def state(self) -> LedgerState:
        """The current state, for ``put_back`` if an ``exchange`` fails."""
        return LedgerState(
            list(self._sequences),
            self._references.copy(),
            self._n_untouched,
            self._n_touched,
            list(self._released),
            list(self._revisions),
            dict(self._reserved),
        )

    def put_back(self, state: LedgerState) -> None:
        """Go back to ``state``. Since then, only ``exchange`` was called, and it may have failed."""
        self._n_unshared.clear()
        self._sequences, self._references = list(state.sequences), state.references
        self._n_untouched, self._n_touched = state.n_untouched, state.n_touched
        self._released, self._revisions = list(state.released), list(state.revisions)
        self._reserved = dict(state.reserved)

    def n_shared(self, seq_id: int, other: int) -> int:
        """The number of cells at the beginning that two sequences share."""
        cells, others = self._sequences[seq_id].cells, self._sequences[other].cells
        n = min(len(cells), len(others))
        if n == 0 or cells[0] != others[0]:
            return 0
        differ = np.flatnonzero(np.array(cells[:n]) != np.array(others[:n]))
        return int(differ[0]) if len(differ) else n

    def n_exclusive(self, seq_id: int) -> int:
        """The number of cells that ``drop`` would free."""
        n_unshared = self._n_unshared.get(seq_id)
        if n_unshared is None:
            n_unshared = int(np.count_nonzero(self._references[self._sequences[seq_id].cells] == 1))
            self._n_unshared[seq_id] = n_unshared
        return n_unshared + self._reserved.get(seq_id, 0)

    def is_restoring(self, seq_id: int) -> bool:
        """Whether cells are reserved for an empty sequence that is being restored."""
        return seq_id in self._reserved

    def reserve(self, seq_id: int, n: int) -> None:
        """Reserve ``n`` cells for an empty sequence that is being restored, until it is dropped or exchanged."""
        self._reserved[seq_id] = n

    def fork_cost(self, src_length: int, n_copied: int = 0) -> int:
        """The number of new cells of a fork of ``src_length`` tokens that has to copy the last ``n_copied``."""
        return n_copied if self._share_forks else src_length

    def cut_cost(self, seq_id: int, start: int, end: int) -> int:
        """The number of new cells of a cut minus the freed cells. Shared cells with rotated keys are copied."""
        cells = self._sequences[seq_id].cells
        copied = np.count_nonzero(self._references[cells[end:]] > 1)
        freed = np.count_nonzero(self._references[cells[start:end]] == 1)
        return int(copied - freed)

    def append(self, seq_id: int, inputs: Iterable[Held]) -> None:
        """Record decoded tokens."""
        self._revisions[seq_id] += 1
        record, n_unshared = self._sequences[seq_id], self._n_unshared.pop(seq_id, None)
        length_before = len(record.inputs)
        record.inputs.extend(inputs)
        n_new = len(record.inputs) - length_before
        record.cells.extend(self._take(n_new))
        if n_unshared is not None:
            self._n_unshared[seq_id] = n_unshared + n_new

    def fork(self, src: int, dst: int, end: int, n_copied: int = 0) -> None:
        """Record that the empty ``dst`` became a copy of ``src[:end]``; the last ``n_copied`` cells are not shared."""
        self._revisions[dst] += 1
        source = self._sequences[src]
        self._forget_unshared(src, dst)
        shared = source.cells[: end - n_copied if self._share_forks else 0]
        np.add.at(self._references, shared, 1)
        cells = [*shared, *self._take(end - len(shared))]
        edits = truncated_edits(source.edits, end)
        self._sequences[dst] = SequenceRecord(source.inputs[:end], cells, edits)

    def truncate(self, seq_id: int, length: int) -> None:
        """Record that the tokens from ``length`` on were removed."""
        self._revisions[seq_id] += 1
        record, n_unshared = self._sequences[seq_id], self._n_unshared.pop(seq_id, None)
        n_freed = self._release(record.cells[length:])
        del record.inputs[length:], record.cells[length:]
        if n_unshared is not None:
            self._n_unshared[seq_id] = n_unshared - n_freed
        record.edits = truncated_edits(record.edits, length)

    def cut(self, seq_id: int, start: int, end: int) -> None:
        """Record that [start, end) was removed and later tokens moved down."""
        self._revisions[seq_id] += 1
        record = self._sequences[seq_id]
        self._forget_unshared(seq_id)
        record.edits.append(Edit(start, tuple(record.inputs[start:end]), len(record.inputs)))
        moved = record.cells[end:]
        shared = [cell for cell in moved if self._references[cell] > 1]
        self._release(record.cells[start:end])
        self._release(shared)
        fresh = iter(self._take(len(shared)))
        unshared = set(moved).difference(shared)
        record.cells[start:] = [cell if cell in unshared else next(fresh) for cell in moved]
        del record.inputs[start:end]

    def drop(self, seq_id: int) -> None:
        """Record that the sequence was dropped."""
        self._revisions[seq_id] += 1
        self._reserved.pop(seq_id, None)
        self._forget_unshared(seq_id)
        self._release(self._sequences[seq_id].cells)
        self._sequences[seq_id] = SequenceRecord()

    def exchange(self, seq_id: int, inputs: Iterable[Held], edits: Iterable[Edit]) -> None:
        """Record new contents of a sequence, without shared cells."""
        held = list(inputs)
        self.drop(seq_id)  # first, because the new contents may need the freed cells
        self._sequences[seq_id] = SequenceRecord(held, self._take(len(held)), edits)

    def set_edits(self, seq_id: int, edits: Iterable[Edit]) -> None:
        """Set the cuts of a sequence that was restored from a dump."""
        self._sequences[seq_id].edits = list(edits)

    def _take(self, n: int) -> list[int]:
        if n == 0:
            return []
        n_fresh = max(0, n - len(self._released))
        split = len(self._released) - (n - n_fresh)
        cells = [*self._released[split:], *range(self._n_touched, self._n_touched + n_fresh)]
        del self._released[split:]
        self._n_touched += n_fresh
        self._n_untouched -= n_fresh
        if self._n_touched > len(self._references):
            grown = np.zeros(max(2 * len(self._references), self._n_touched), np.int32)
            grown[: len(self._references)] = self._references
            self._references = grown
        self._references[cells] = 1
        return cells

    def _forget_unshared(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self._n_unshared.pop(seq_id, None)

    def _release(self, cells: Sequence[int]) -> int:
        """Decrement the reference count of each cell; returns the number of cells that became free."""
        if not cells:
            return 0
        released = np.array(cells)
        if (self._references[released] == 2).any():
            self._n_unshared.clear()  # another sequence does not share these cells any more
        np.subtract.at(self._references, released, 1)
        freed = released[self._references[released] == 0].tolist()
        self._released += freed
        return len(freed)


def truncated_edits(edits: Sequence[Edit], length: int) -> list[Edit]:
    """The edits of the first ``length`` tokens of a sequence.

    A cut at or after ``length`` did not affect these tokens. An earlier cut did: its edit needs the removed tokens and
    the remaining tokens after them, counted before the cut.
    """
    remaining: list[Edit] = []
    for edit in reversed(edits):
        if length <= edit.start:
            continue
        length += len(edit.removed)
        remaining.append(Edit(edit.start, edit.removed, min(edit.length_before, length)))
    return remaining[::-1]


def tail_edits(edits: Sequence[Edit], start: int) -> list[Edit] | None:
    """The edits at or after ``start``, with positions relative to ``start``.

    None if tokens from ``start`` on were decoded before a cut in front of them: their values depend on the removed
    tokens, so these tokens cannot be decoded again alone.
    """
    before = truncated_edits(edits, start)
    later = edits[len(before) :]
    made_before = [(edit.start, edit.length_before) for edit in edits[: len(before)]]
    if made_before != [(edit.start, edit.length_before) for edit in before] or any(e.start < start for e in later):
        return None
    return [Edit(edit.start - start, edit.removed, edit.length_before - start) for edit in later]


def replay_plan(inputs: Sequence[Held], edits: Sequence[Edit]) -> tuple[list[list[Held]], int]:
    """The runs to decode, and the cuts between them, that rebuild an edited sequence.

    Returns:
        runs: ``len(edits) + 1`` runs of inputs: decode ``runs[i]``, then make ``edits[i]``, ...
        peak: the largest length of the sequence during the replay.
    """
    original = list(inputs)
    for edit in reversed(edits):
        original[edit.start : edit.start] = edit.removed
    runs: list[list[Held]] = []
    done = length = peak = 0
    for edit in edits:
        n = edit.length_before - length
        runs.append(original[done : done + n])
        done, peak, length = done + n, max(peak, edit.length_before), edit.length_before - len(edit.removed)
    runs.append(original[done:])
    return runs, max(peak, len(inputs))
