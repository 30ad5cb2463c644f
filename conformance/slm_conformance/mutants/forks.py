"""Toys that fork or drop wrongly, or declare what is not so."""

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
        """Refuse."""
        raise UnsupportedEdit("this engine cannot cut")


@mutant("TestFork::test_copy_and_original_diverge")
class ForkIsAnAlias(ToyContext):
    """A fork and its original are the same list."""

    def decode(self, batch: Batch) -> Logits:
        """Grow the aliases, too."""
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
    """``drop`` clears shared storage of the other sequence."""

    def drop(self, seq_id: int) -> None:
        """Clear all that was held."""
        for cell in self.cells[self._checked(seq_id)]:
            cell.values[...] = 0
        super().drop(seq_id)


@mutant("TestFork::test_what_dropping_would_free")
class DroppingFreesAll(ToyContext):
    """``n_exclusive`` also counts positions of other sequences."""

    def n_exclusive(self, seq_id: int) -> int:
        """All."""
        return self.length(seq_id)


@mutant("TestFork::test_shares_storage_as_declared")
class SharingOverdeclared(ToyContext):
    """Shared forks are declared, but a fork copies."""

    def forked(self, cells: list[Cell]) -> list[Cell]:
        """Copy."""
        return [dataclasses.replace(cell) for cell in cells]


@mutant("TestFork::test_shares_storage_as_declared")
class DropFreesTwice(ToyContext):
    """Dropping one side of a fork frees the shared positions."""

    freed = 0

    @property
    def n_free(self) -> int:
        """More and more."""
        return super().n_free + self.freed

    def drop(self, seq_id: int) -> None:
        """Count all that was held."""
        before, n_held = super().n_free, self.length(seq_id)
        super().drop(seq_id)
        self.freed += n_held - (super().n_free - before)


@mutant("TestFork::test_without_room")
class ForkReservesRoom(ToyContext):
    """A fork that shares storage is refused if a copy would not fit."""

    def forked(self, cells: list[Cell]) -> list[Cell]:
        """Look for room."""
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
        """Stop one short."""
        for seq_id in range(self.n_seq_max - 1):
            self.drop(seq_id)


@mutant("TestFork::test_of_the_first_tokens")
class ForkIgnoresEnd(ToyContext):
    """``fork`` ignores ``end`` and copies the whole sequence."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Copy all."""
        place = super().fork(src, dst, end)
        self.replace(dst, self.cells[src], self.edits[src])
        return place


@mutant("TestFork::test_the_copy_goes_on_as_the_original")
class ForkPointsToTheStart(ToyContext):
    """A fork of a whole sequence returns position 0."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Say so."""
        place = super().fork(src, dst, end)
        return Pos(dst, 0) if end is None else place


@mutant("TestFork::test_many_copies")
class FiveSides(ToyContext):
    """Storage that more than five sequences share is overwritten."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Change it."""
        place = super().fork(src, dst, end)
        if sum(self.cells[dst][:1] == cells[:1] for cells in self.cells) > 5:
            self.cells[dst][0] = self.engine.moved(self.cells[dst][0], 1)
        return place


@mutant("TestFork::test_a_copy_of_a_copy")
class CopiesAreShallow(ToyContext):
    """A copy of a copy has zeros for tokens that the first copy added."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        self.copied: dict[int, int] = {}

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Copy what was copied."""
        place = super().fork(src, dst, end)
        n_copied = self.copied.get(src, place.index)
        self.cells[dst][n_copied:] = [
            dataclasses.replace(cell, values=np.zeros_like(cell.values)) for cell in self.cells[dst][n_copied:]
        ]
        self.copied[dst] = place.index
        return place


@mutant("TestFork::test_truncating_one_leaves_the_other")
class TruncateWritesWhatIsShared(ToyContext):
    """``truncate`` to before the end of a fork clears the values of both sequences."""

    def truncate(self, pos: Pos) -> Pos:
        """Clear."""
        cells = self.cells[self._checked(pos.seq_id)]
        others = [id(cell) for seq_id, other in enumerate(self.cells) if seq_id != pos.seq_id for cell in other]
        shared = [cell for cell in cells if id(cell) in others][max(0, pos.index) :]
        place = super().truncate(pos)
        for cell in shared:
            cell.values[...] = 0
        return place


@mutant("TestFork::test_into_a_sequence_that_is_taken")
class ForkOverwrites(ToyContext):
    """A fork into a sequence that is not empty replaces it."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Empty it first."""
        if src != dst and src in range(self.n_seq_max) and dst in range(self.n_seq_max):
            self.drop(dst)
        return super().fork(src, dst, end)


@mutant("TestFork::test_of_more_than_there_is")
class ForkClamps(ToyContext):
    """``fork`` clamps an ``end`` past the length."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Clamp."""
        return super().fork(src, dst, end if end is None else min(end, self.length(src)))


@mutant("TestDrop::test_one_sequence")
class DropEmptiesTheNext(ToyContext):
    """``drop`` of a sequence with an unrelated neighbour changes the neighbour."""

    def drop(self, seq_id: int) -> None:
        """Change it."""
        first = [id(cell) for cell in self.cells[self._checked(seq_id)]][:1]
        super().drop(seq_id)
        for other in self.cells[seq_id + 1 : seq_id + 2]:
            if first and len(other) == 20 and [id(other[0])] != first:
                other[-1] = self.engine.moved(other[-1], 1)


@mutant("TestDrop::test_an_empty_one_or_none")
class EmptyDropRefused(ToyContext):
    """Dropping an empty sequence is an error."""

    def drop(self, seq_id: int) -> None:
        """Refuse."""
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
        """Allow it."""
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
        """Allow it."""
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
    """``fork_cost`` of a part is its length, though nothing is decoded again."""

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """Count the tokens."""
        super().fork_cost(src, end)
        return 0 if end in (None, self.length(src)) else int(end or 0)
