"""Mutants that fail only after an unusual order of calls, or on a hostile dump."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import SlmError
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos

PROGRAMS = "TestModelBased::test_random_programs"


class _Restored(Cell):
    """A cell that was restored from a dump."""


@mutant(PROGRAMS)
class CutOfWhatWasRestored(ToyContext):
    """A cut of a restored sequence does not rotate the restored keys."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Mark the cells as restored."""
        cells, edits = super().unpack_payload(snapshot)
        return [_Restored(cell.token, cell.keys, cell.values) for cell in cells], edits

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Rotate only the keys that were not restored."""
        remaining, edits = super().cut_cells(cells, edits, first, last)
        moved = zip(cells[last:], remaining[first:], strict=True)
        return remaining[:first] + [
            Cell(old.token, old.keys, old.values) if isinstance(old, _Restored) else new for old, new in moved
        ], edits


@mutant(PROGRAMS)
class RestoreFreesTheFork(ToyContext):
    """``restore`` over one side of a fork removes the shared cells from the other side."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Remove the replaced cells from all sequences."""
        replaced = {id(cell) for cell in self.cells[self._checked(seq_id)]}
        returned = super().restore(seq_id, data)
        self.cells = [[cell for cell in cells if id(cell) not in replaced] for cells in self.cells]
        return returned


@mutant(PROGRAMS)
class BatchLeftByARefusal(ToyContext):
    """The batch after a refused one returns its rows in reverse order."""

    refused = False

    def decode(self, batch: Batch) -> Logits:
        """Reverse the rows if the batch before was refused."""
        try:
            rows = super().decode(batch)
        except SlmError:
            self.refused = True
            raise
        rows = rows[::-1] if self.refused else rows
        self.refused = False
        return rows


class _Remembers(ToyContext):
    """A context that keeps the last dump of any context."""

    last = b""

    def dump(self, seq_id: int) -> bytes:
        """Keep the dump as the last one."""
        _Remembers.last = super().dump(seq_id)
        return _Remembers.last


@mutant("TestHostileDumps::test_every_byte")
class ChecksumWithAHole(_Remembers):
    """The checksum does not cover one byte of the payload."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Replace byte 1111 by that of the last dump."""
        return super().restore(seq_id, data[:1111] + self.last[1111:1112] + data[1112:])


@mutant("TestHostileDumps::test_every_truncation")
class LostBytesFilledIn(_Remembers):
    """A dump that is 77 bytes too short is replaced by the last dump."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Restore the last dump if the data is 77 bytes shorter."""
        return super().restore(seq_id, self.last if len(data) + 77 == len(self.last) else data)


@mutant("TestHostileDumps::test_hostile_dumps")
class RemovedTokensUnchecked(ToyContext):
    """The tokens that a dump lists as removed by cuts are not checked."""

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        edits = tuple(dataclasses.replace(edit, removed=(0,) * len(edit.removed)) for edit in snapshot.edits)
        super()._check_snapshot(seq_id, dataclasses.replace(snapshot, edits=edits))


@mutant("TestHostileDumps::test_memory_for_hostile_dumps")
class RoomBeforeTheCheck(ToyContext):
    """Memory is allocated by the sizes in the header, before any check."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Allocate memory for each number of four or more digits in the first 600 bytes."""
        for n in re.findall(rb"[0-9]{4,}", data[:600]):
            np.empty(min(int(n), 2**26), np.uint8)
        return super().restore(seq_id, data)
