"""Who holds which positions: token histories, their edits, and the cells of a KV cache that they share.

A history holds ``Held`` inputs: token ids, and records of embedding rows and of tokens in bidirectional blocks.

A cell is one position's worth of KV storage. Each context has ``n_ctx`` of them; a fork shares its source's cells
until one side changes them. A backend may use the cell numbers as rows of its own buffers, or ignore them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held
from slm_core.context.snapshot import Edit


class SequenceRecord:
    """One sequence: its inputs, the cell of each, and the cuts that led here."""

    __slots__ = ("cells", "edits", "inputs")

    def __init__(self, inputs: Iterable[Held] = (), cells: Iterable[int] = (), edits: Iterable[Edit] = ()) -> None:
        self.inputs = list(inputs)
        self.cells = list(cells)
        self.edits = list(edits)


class LedgerState(NamedTuple):
    """All that a ledger knows; the records in it must not be changed any more."""

    sequences: list[SequenceRecord]
    references: NDArray[np.int32]
    n_untouched: int
    n_touched: int
    released: list[int]
    revisions: list[int]


class Ledger:
    """Bookkeeping of a context. Callers check arguments and room first; nothing here raises on purpose.

    Args:
        n_ctx: cells.
        n_seq_max: sequences.
        share_forks: whether a fork shares cells; otherwise it takes new ones.
    """

    def __init__(self, n_ctx: int, n_seq_max: int, *, share_forks: bool) -> None:
        self._sequences = [SequenceRecord() for _ in range(n_seq_max)]
        # Cells are numbered as they are first taken, so that a large n_ctx costs nothing until it is used.
        self._references = np.zeros(min(n_ctx, 256), np.int32)
        self._n_untouched = n_ctx
        self._n_touched = 0
        self._released: list[int] = []
        self._share_forks = share_forks
        self._revisions = [0] * n_seq_max

    def clear(self) -> None:
        """All sequences were forgotten; the bookkeeping takes as little memory as at first."""
        self._sequences = [SequenceRecord() for _ in self._sequences]
        self._n_untouched += self._n_touched
        self._n_touched, self._released = 0, []
        self._references = np.zeros(min(self._n_untouched, 256), np.int32)

    @property
    def n_free(self) -> int:
        """Cells that no sequence holds."""
        return self._n_untouched + len(self._released)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence."""
        return len(self._sequences[seq_id].inputs)

    def inputs(self, seq_id: int) -> Sequence[Held]:
        """What a sequence holds; not a copy."""
        return self._sequences[seq_id].inputs

    def cells(self, seq_id: int) -> NDArray[np.int32]:
        """The cell of each position, int32 [S]."""
        return np.array(self._sequences[seq_id].cells, np.int32)

    def edits(self, seq_id: int) -> tuple[Edit, ...]:
        """The cuts that led to what a sequence holds, oldest first."""
        return tuple(self._sequences[seq_id].edits)

    def revision(self, seq_id: int) -> int:
        """A number that is another after each change of the sequence."""
        return self._revisions[seq_id]

    def state(self) -> LedgerState:
        """What is known now, for ``put_back`` after an exchange of a sequence that failed."""
        return LedgerState(
            list(self._sequences),
            self._references.copy(),
            self._n_untouched,
            self._n_touched,
            list(self._released),
            list(self._revisions),
        )

    def put_back(self, state: LedgerState) -> None:
        """``exchange`` was called since ``state`` was, perhaps in vain, and nothing else."""
        self._sequences, self._references = list(state.sequences), state.references
        self._n_untouched, self._n_touched = state.n_untouched, state.n_touched
        self._released, self._revisions = list(state.released), list(state.revisions)

    def n_shared(self, seq_id: int, other: int) -> int:
        """First cells that two sequences have in common."""
        cells, others = self._sequences[seq_id].cells, self._sequences[other].cells
        n = min(len(cells), len(others))
        if n == 0 or cells[0] != others[0]:
            return 0
        differ = np.flatnonzero(np.array(cells[:n]) != np.array(others[:n]))
        return int(differ[0]) if len(differ) else n

    def n_exclusive(self, seq_id: int) -> int:
        """Cells that dropping the sequence would free."""
        return int(np.count_nonzero(self._references[self._sequences[seq_id].cells] == 1))

    def fork_cost(self, src_length: int, n_copied: int = 0) -> int:
        """New cells that a fork of ``src_length`` tokens takes, of which the last ``n_copied`` cannot be shared."""
        return n_copied if self._share_forks else src_length

    def cut_cost(self, seq_id: int, start: int, end: int) -> int:
        """New cells that a cut takes, less those it frees; moved cells that others hold must be copied."""
        cells = self._sequences[seq_id].cells
        copied = np.count_nonzero(self._references[cells[end:]] > 1)
        freed = np.count_nonzero(self._references[cells[start:end]] == 1)
        return int(copied - freed)

    def append(self, seq_id: int, inputs: Iterable[Held]) -> None:
        """Tokens were decoded."""
        self._revisions[seq_id] += 1
        record = self._sequences[seq_id]
        known = len(record.inputs)
        record.inputs.extend(inputs)
        record.cells.extend(self._take(len(record.inputs) - known))

    def fork(self, src: int, dst: int, end: int, n_copied: int = 0) -> None:
        """``dst``, which is empty, became a copy of ``src[:end]``; the last ``n_copied`` cells are not shared."""
        self._revisions[dst] += 1
        source = self._sequences[src]
        shared = source.cells[: end - n_copied if self._share_forks else 0]
        np.add.at(self._references, shared, 1)
        cells = [*shared, *self._take(end - len(shared))]
        edits = truncated_edits(source.edits, end)
        self._sequences[dst] = SequenceRecord(source.inputs[:end], cells, edits)

    def truncate(self, seq_id: int, length: int) -> None:
        """The tail from ``length`` on was forgotten."""
        self._revisions[seq_id] += 1
        record = self._sequences[seq_id]
        self._release(record.cells[length:])
        del record.inputs[length:], record.cells[length:]
        record.edits = truncated_edits(record.edits, length)

    def cut(self, seq_id: int, start: int, end: int) -> None:
        """[start, end) was forgotten and later tokens moved down."""
        self._revisions[seq_id] += 1
        record = self._sequences[seq_id]
        record.edits.append(Edit(start, tuple(record.inputs[start:end]), len(record.inputs)))
        moved = record.cells[end:]
        shared = [cell for cell in moved if self._references[cell] > 1]
        self._release(record.cells[start:end])
        self._release(shared)
        fresh = iter(self._take(len(shared)))
        kept = set(moved).difference(shared)
        record.cells[start:] = [cell if cell in kept else next(fresh) for cell in moved]
        del record.inputs[start:end]

    def drop(self, seq_id: int) -> None:
        """The sequence was forgotten."""
        self._revisions[seq_id] += 1
        empty = SequenceRecord()  # first: an interrupt between the next two lines would free the cells twice
        self._release(self._sequences[seq_id].cells)
        self._sequences[seq_id] = empty

    def exchange(self, seq_id: int, inputs: Iterable[Held], edits: Iterable[Edit]) -> None:
        """The sequence holds something else, of which nothing is shared."""
        held = list(inputs)
        self.drop(seq_id)
        self._sequences[seq_id] = SequenceRecord(held, self._take(len(held)), edits)

    def set_edits(self, seq_id: int, edits: Iterable[Edit]) -> None:
        """The sequence was restored from a dump with this history."""
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

    def _release(self, cells: Sequence[int]) -> None:
        if not cells:
            return
        released = np.array(cells)
        np.subtract.at(self._references, released, 1)
        # No Python function is called here, in which an interrupt could leave some cells without an owner.
        self._released += released[self._references[released] == 0].tolist()


def truncated_edits(edits: Sequence[Edit], length: int) -> list[Edit]:
    """The history of a sequence of which only the first ``length`` tokens are kept.

    A cut at or after ``length`` left no mark on what is kept. An earlier one did, and needs the tokens it removed
    and those after it that are kept, counted as they were before the cut.
    """
    kept: list[Edit] = []
    for edit in reversed(edits):
        if length <= edit.start:
            continue
        length += len(edit.removed)
        kept.append(Edit(edit.start, edit.removed, min(edit.length_before, length)))
    return kept[::-1]


def tail_edits(edits: Sequence[Edit], start: int) -> list[Edit] | None:
    """The edits that were made at or after ``start``, counted from there.

    None where positions from ``start`` on were decoded before an edit in front of them: what they hold depends on what
    was removed, so they cannot be decoded by themselves.
    """
    before = truncated_edits(edits, start)
    later = edits[len(before) :]
    made_before = [(edit.start, edit.length_before) for edit in edits[: len(before)]]
    if made_before != [(edit.start, edit.length_before) for edit in before] or any(e.start < start for e in later):
        return None
    return [Edit(edit.start - start, edit.removed, edit.length_before - start) for edit in later]


def replay_plan(inputs: Sequence[Held], edits: Sequence[Edit]) -> tuple[list[list[Held]], int]:
    """What to decode, and between which runs to cut, to rebuild an edited sequence.

    Returns:
        runs: ``len(edits) + 1`` runs of inputs: decode ``runs[i]``, then make ``edits[i]``, ...
        peak: the longest the sequence gets on the way.
    """
    original = list(inputs)
    for edit in reversed(edits):
        original[edit.start : edit.start] = edit.removed
    runs: list[list[Held]] = []
    done = held = peak = 0
    for edit in edits:
        n = edit.length_before - held
        runs.append(original[done : done + n])
        done, peak, held = done + n, max(peak, edit.length_before), edit.length_before - len(edit.removed)
    runs.append(original[done:])
    return runs, max(peak, len(inputs))
