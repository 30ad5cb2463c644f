"""Toys that truncate, cut, fork or drop wrongly."""

from __future__ import annotations

import dataclasses

import numpy as np

from slm_conformance.faults.registry import fault
from slm_conformance.toy_context import ToyContext
from slm_conformance.toy_engine import Cell
from slm_core.errors import UnsupportedEdit
from slm_core.protocols import Batch
from slm_core.snapshot import Edit
from slm_core.types import Capability, Logits, Pos


@fault("TestTruncate::test_replaying_the_tail_gives_what_it_gave")
class TruncateOffByOne(ToyContext):
    """``truncate`` keeps a token too many."""

    def truncate(self, pos: Pos) -> Pos:
        """Keep one more."""
        super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return pos


@fault("TestTruncate::test_past_the_end")
class TruncateClamps(ToyContext):
    """``truncate`` past the end is taken for a no-op."""

    def truncate(self, pos: Pos) -> Pos:
        """Clamp."""
        return super().truncate(Pos(pos.seq_id, min(pos.index, self.length(pos.seq_id))))


@fault("TestTruncate::test_frees_positions")
class TruncateLeaksPositions(ToyContext):
    """Positions that ``truncate`` forgets stay taken."""

    leaked = 0

    @property
    def n_free(self) -> int:
        """Fewer and fewer."""
        return super().n_free - self.leaked

    def truncate(self, pos: Pos) -> Pos:
        """Leak."""
        before = self.n_free
        place = super().truncate(pos)
        self.leaked += self.n_free - before
        return place


class _Moves(ToyContext):
    """A context whose engine moves cells wrongly."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Cut with ``move`` in place of the engine's."""
        kept, edits = super().without(cells, edits, first, last)
        return kept[:first] + [self.move(cell, first - last) for cell in cells[last:]], edits

    def move(self, cell: Cell, by: int) -> Cell:
        """The wrong way to move a cell."""
        raise NotImplementedError


@fault("TestCut::test_at_the_head")
class CutWithoutRotation(_Moves):
    """Keys keep the positions they had before a cut."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Not at all."""
        return dataclasses.replace(cell)


@fault("TestCut::test_in_the_middle")
class CutUpwards(_Moves):
    """Keys are rotated the wrong way."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Up."""
        return self.engine.moved(cell, -by)


@fault("TestCut::test_one_token")
class CutHalfRotation(_Moves):
    """Only the first half of each key is rotated."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Half."""
        moved, half = self.engine.moved(cell, by), self.engine.shape.head_dim // 2
        keys = np.concatenate((moved.keys[..., :half], cell.keys[..., half:]), axis=-1)
        return Cell(cell.token, keys, cell.values)


@fault("TestCut::test_is_no_fresh_prefill")
class CutRecomputes(ToyContext):
    """What remains after a cut is decoded anew."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Prefill."""
        _, edits = super().without(cells, edits, first, last)
        kept = cells[:first]
        for cell in cells[last:]:
            kept.append(self.engine.step(cell.token, kept)[0])
        return kept, edits


@fault("TestCut::test_of_a_fork")
class CutChangesTheFork(ToyContext):
    """A cut of shared storage moves the keys of the other side, too."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Write what is shared."""
        for cell in cells[last:]:
            cell.keys[...] = self.engine.moved(cell, first - last).keys
        kept, edits = super().without(cells, edits, first, last)
        return kept[:first] + [dataclasses.replace(cell) for cell in cells[last:]], edits


@fault("TestDeclarations::test_cut_as_declared")
class CutOverdeclared(ToyContext):
    """The edit level is CUT, but a cut is refused."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Refuse."""
        raise UnsupportedEdit("this engine cannot cut")


@fault("TestFork::test_copy_and_original_diverge")
class ForkIsAnAlias(ToyContext):
    """Copy and original are one list."""

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


@fault("TestFork::test_dropping_one_leaves_the_other")
class DropFreesNeighbour(ToyContext):
    """``drop`` frees shared storage under the other side."""

    def drop(self, seq_id: int) -> None:
        """Free all that was shared."""
        dropped = {id(cell) for cell in self.cells[self._checked(seq_id)]}
        super().drop(seq_id)
        for other, cells in enumerate(self.cells):
            self.cells[other] = [cell for cell in cells if id(cell) not in dropped]


@fault("TestFork::test_shares_storage_as_declared")
class SharingOverdeclared(ToyContext):
    """Shared forks are declared, but a fork copies."""

    def forked(self, cells: list[Cell]) -> list[Cell]:
        """Copy."""
        return [dataclasses.replace(cell) for cell in cells]


@fault("TestFork::test_without_room")
class SharingUnderdeclared(ToyContext):
    """Forks share storage, and that is not declared."""

    capabilities = frozenset({Capability.KV_PAYLOAD})


@fault("TestDrop::test_all")
class ClearForgetsTheLast(ToyContext):
    """``clear`` leaves the last sequence."""

    def clear(self) -> None:
        """Stop one short."""
        for seq_id in range(self.n_seq_max - 1):
            self.drop(seq_id)


@fault("TestFork::test_of_the_first_tokens")
class ForkIgnoresEnd(ToyContext):
    """``fork`` copies all, whatever ``end`` says."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Copy all."""
        place = super().fork(src, dst, end)
        self.replace(dst, self.cells[src], self.edits[src])
        return place
