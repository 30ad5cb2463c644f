"""Mutants that fork or drop wrongly, or declare wrong capabilities."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell, ToyEngine
from slm_core.errors import ContextFull, InvalidSequence, UnsupportedEdit
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, Pos


@mutant("TestDeclarations::test_cut_as_declared")
class CutOverdeclared(ToyContext):
    """The edit level is CUT, but a cut is refused."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Raise ``UnsupportedEdit``."""
        raise UnsupportedEdit("this engine cannot cut")


@mutant("TestFork::test_copy_and_original_diverge")
class ForkIsAnAlias(ToyContext):
    """A token that is decoded into a fork is also added to its original, and vice versa."""

    def decode(self, batch: Batch) -> Logits:
        """Give sequences that had the same cells before the batch the longer list after it."""
        aliases = [(a, b) for a in range(self.n_seq_max) for b in range(a) if self.cells[a] and self._same(a, b)]
        rows = super().decode(batch)
        for a, b in aliases:
            longer = max(self.cells[a], self.cells[b], key=len)
            self.cells[a], self.cells[b] = list(longer), list(longer)
        return rows

    def _same(self, a: int, b: int) -> bool:
        return [id(cell) for cell in self.cells[a]] == [id(cell) for cell in self.cells[b]]


@mutant("TestFork::test_dropping_one_leaves_the_other")
class DropClearsTheFork(ToyContext):
    """``drop`` clears the values that the sequence shares with its fork."""

    def drop(self, seq_id: int) -> None:
        """Set all values of the sequence to zeros in place."""
        for cell in self.cells[self._checked(seq_id)]:
            cell.values[...] = 0
        super().drop(seq_id)


@mutant("TestFork::test_what_dropping_would_free")
class DroppingFreesAll(ToyContext):
    """``n_exclusive`` also counts shared positions."""

    def n_exclusive(self, seq_id: int) -> int:
        """Return the length of the sequence."""
        return self.length(seq_id)


@mutant("TestFork::test_shares_storage_as_declared")
class SharingOverdeclared(ToyContext):
    """Shared forks are declared, but a fork copies."""

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """Copy the cells."""
        return [dataclasses.replace(cell) for cell in cells]


@mutant("TestFork::test_shares_storage_as_declared")
class DropFreesTwice(ToyContext):
    """Dropping one side of a fork counts the shared positions as free."""

    freed = 0

    @property
    def n_free(self) -> int:
        """The number of free positions plus the shared positions of dropped sequences."""
        return super().n_free + self.freed

    def drop(self, seq_id: int) -> None:
        """Count the shared positions of the sequence as free."""
        before, n_held = super().n_free, self.length(seq_id)
        super().drop(seq_id)
        self.freed += n_held - (super().n_free - before)


@mutant("TestFork::test_without_room")
class ForkReservesRoom(ToyContext):
    """A fork that shares storage is refused if a copy would not fit."""

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """Raise ``ContextFull`` if a copy would not fit."""
        if len(cells) > self.n_free:
            raise ContextFull(len(cells), self.n_free)
        return cells


@mutant("TestFork::test_without_room")
class SharingUnderdeclared(ToyContext):
    """Forks share storage, but ``shared_fork`` is not declared."""

    capabilities = frozenset({Capability.KV_PAYLOAD})


@mutant("TestDrop::test_all")
class ClearForgetsTheLast(ToyContext):
    """``clear`` does not clear the last sequence."""

    def clear(self) -> None:
        """Drop all sequences except the last."""
        for seq_id in range(self.n_seq_max - 1):
            self.drop(seq_id)


@mutant("TestFork::test_of_the_first_tokens")
class ForkIgnoresEnd(ToyContext):
    """``fork`` ignores ``end`` and copies the whole sequence."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Replace the fork by a fork of the whole sequence."""
        returned = super().fork(src, dst, end)
        self.replace(dst, self.cells[src], self.edits[src])
        return returned


@mutant("TestFork::test_the_copy_goes_on_as_the_original")
class ForkPointsToTheStart(ToyContext):
    """A fork of a whole sequence returns position 0."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Return position 0 if ``end`` is None."""
        returned = super().fork(src, dst, end)
        return Pos(dst, 0) if end is None else returned


@mutant("TestFork::test_many_copies")
class FiveSides(ToyContext):
    """If more than five sequences share storage, the first key of the newest fork is rotated."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Rotate the fork's first key if more than five sequences share it."""
        returned = super().fork(src, dst, end)
        if sum(self.cells[dst][:1] == cells[:1] for cells in self.cells) > 5:
            self.cells[dst][0] = self.engine.moved(self.cells[dst][0], 1)
        return returned


@mutant("TestFork::test_a_copy_of_a_copy")
class CopiesAreShallow(ToyContext):
    """A fork of a fork has zeros for the values of tokens that the first fork added."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        self.copied: dict[int, int] = {}

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Set the values after the tokens that were forked before to zeros."""
        returned = super().fork(src, dst, end)
        n_copied = self.copied.get(src, returned.index)
        self.cells[dst][n_copied:] = [
            dataclasses.replace(cell, values=np.zeros_like(cell.values)) for cell in self.cells[dst][n_copied:]
        ]
        self.copied[dst] = returned.index
        return returned


@mutant("TestFork::test_truncating_one_leaves_the_other")
class TruncateWritesWhatIsShared(ToyContext):
    """``truncate`` of one side of a fork clears shared values after the new end."""

    def truncate(self, pos: Pos) -> Pos:
        """Set the removed values that are shared to zeros in place."""
        cells = self.cells[self._checked(pos.seq_id)]
        others = [id(cell) for seq_id, other in enumerate(self.cells) if seq_id != pos.seq_id for cell in other]
        shared = [cell for cell in cells if id(cell) in others][max(0, pos.index) :]
        returned = super().truncate(pos)
        for cell in shared:
            cell.values[...] = 0
        return returned


@mutant("TestFork::test_into_a_sequence_that_is_taken")
class ForkOverwrites(ToyContext):
    """A fork into a sequence that is not empty replaces it."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Drop the target sequence first."""
        if src != dst and src in range(self.n_seq_max) and dst in range(self.n_seq_max):
            self.drop(dst)
        return super().fork(src, dst, end)


@mutant("TestFork::test_of_more_than_there_is")
class ForkClamps(ToyContext):
    """``fork`` clamps an ``end`` past the length."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Clamp ``end`` to the length of the source."""
        return super().fork(src, dst, end if end is None else min(end, self.length(src)))


@mutant("TestDrop::test_one_sequence")
class DropEmptiesTheNext(ToyContext):
    """``drop`` rotates the last key of the next sequence if it is unrelated and has 20 tokens."""

    def drop(self, seq_id: int) -> None:
        """Rotate the last key of the next sequence."""
        first = [id(cell) for cell in self.cells[self._checked(seq_id)]][:1]
        super().drop(seq_id)
        for other in self.cells[seq_id + 1 : seq_id + 2]:
            if first and len(other) == 20 and [id(other[0])] != first:
                other[-1] = self.engine.moved(other[-1], 1)


@mutant("TestDrop::test_an_empty_one_or_none")
class EmptyDropRefused(ToyContext):
    """Dropping an empty sequence is an error."""

    def drop(self, seq_id: int) -> None:
        """Raise ``InvalidSequence`` if the sequence is empty."""
        if not self.length(seq_id):
            raise InvalidSequence("the sequence is empty")
        super().drop(seq_id)


@mutant("TestDeclarations::test_truncate_as_declared")
class TruncateUnderdeclared(ToyContext):
    """The edit level is REPLAY, but ``truncate`` works."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, EditLevel.REPLAY)

    def _check_level(self, level: EditLevel) -> None:
        if level is not EditLevel.TRUNCATE:
            super()._check_level(level)


@mutant("TestDeclarations::test_cut_as_declared")
class CutUnderdeclared(ToyContext):
    """The edit level is TRUNCATE, but ``cut`` works."""

    cutting = False

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, EditLevel.TRUNCATE)

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Allow the cut at level TRUNCATE."""
        self.cutting = True
        try:
            return super().cut(start, end)
        finally:
            self.cutting = False

    def _check_level(self, level: EditLevel) -> None:
        if not self.cutting:
            super()._check_level(level)


@mutant("TestDeclarations::test_a_strangers_cuts_as_declared")
class ReplayUnderdeclared(ToyContext):
    """The edit level is TRUNCATE, but cuts of another backend's dump are replayed."""

    replaying = False

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, EditLevel.TRUNCATE)

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Allow a replay of cuts at level TRUNCATE."""
        self.replaying = True
        try:
            return super().restore(seq_id, data)
        finally:
            self.replaying = False

    def _check_level(self, level: EditLevel) -> None:
        if not self.replaying:
            super()._check_level(level)


@mutant("TestDeclarations::test_are_of_the_contract")
class CapabilitiesAreStrings(ToyContext):
    """Capabilities are plain strings."""

    capabilities = cast("frozenset[Capability]", frozenset({"shared_fork", "kv_payload"}))


@mutant("TestFork::test_what_it_decodes_again")
class ForkCostIsItsLength(ToyContext):
    """``fork_cost`` of a prefix is its length, although nothing is decoded again."""

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """Return ``end``."""
        super().fork_cost(src, end)
        return 0 if end in (None, self.length(src)) else int(end or 0)
