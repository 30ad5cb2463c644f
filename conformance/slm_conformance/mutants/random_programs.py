"""Broken toys that only an odd order of calls, or a hostile dump, brings out."""

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
    """A cell that came out of a dump."""


@mutant(PROGRAMS)
class CutOfWhatWasRestored(ToyContext):
    """A cut of a restored sequence does not rotate keys."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Mark the cells."""
        cells, edits = super().unpacked(snapshot)
        return [_Restored(cell.token, cell.keys, cell.values) for cell in cells], edits

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Do not rotate those that are marked."""
        kept, edits = super().without(cells, edits, first, last)
        moved = zip(cells[last:], kept[first:], strict=True)
        return kept[:first] + [
            Cell(old.token, old.keys, old.values) if isinstance(old, _Restored) else new for old, new in moved
        ], edits


@mutant(PROGRAMS)
class RestoreFreesTheFork(ToyContext):
    """``restore`` over one side of a fork frees the shared positions."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Free it."""
        replaced = {id(cell) for cell in self.cells[self._checked(seq_id)]}
        place = super().restore(seq_id, data)
        self.cells = [[cell for cell in cells if id(cell) not in replaced] for cells in self.cells]
        return place


@mutant(PROGRAMS)
class BatchLeftByARefusal(ToyContext):
    """The batch after a refused one returns its rows in the wrong order."""

    refused = False

    def decode(self, batch: Batch) -> Logits:
        """Remember the refusal."""
        try:
            rows = super().decode(batch)
        except SlmError:
            self.refused = True
            raise
        rows = rows[::-1] if self.refused else rows
        self.refused = False
        return rows


class _Remembers(ToyContext):
    """A context that knows the last dump that was made, by any."""

    last = b""

    def dump(self, seq_id: int) -> bytes:
        """Keep it."""
        _Remembers.last = super().dump(seq_id)
        return _Remembers.last


@mutant("TestHostileDumps::test_every_byte")
class ChecksumWithAHole(_Remembers):
    """The checksum omits one byte of the payload."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Correct that byte."""
        return super().restore(seq_id, data[:1111] + self.last[1111:1112] + data[1112:])


@mutant("TestHostileDumps::test_every_truncation")
class LostBytesFilledIn(_Remembers):
    """A dump that lacks 77 bytes is completed from a buffer."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Complete it."""
        return super().restore(seq_id, self.last if len(data) + 77 == len(self.last) else data)


@mutant("TestHostileDumps::test_hostile_dumps")
class RemovedTokensUnchecked(ToyContext):
    """Tokens of a dump that cuts removed are not checked."""

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        edits = tuple(dataclasses.replace(edit, removed=(0,) * len(edit.removed)) for edit in snapshot.edits)
        super()._check_snapshot(seq_id, dataclasses.replace(snapshot, edits=edits))


@mutant("TestHostileDumps::test_memory_for_hostile_dumps")
class RoomBeforeTheCheck(ToyContext):
    """Memory is allocated by the size in the header, before any check."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Take it."""
        for n in re.findall(rb"[0-9]{4,}", data[:600]):
            np.empty(min(int(n), 2**26), np.uint8)
        return super().restore(seq_id, data)
