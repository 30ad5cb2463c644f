"""Toys that truncate or cut wrongly."""

from __future__ import annotations

import dataclasses

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.snapshot import Edit
from slm_core.errors import InvalidPosition, InvalidSequence
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


@mutant("TestTruncate::test_another_tail_gives_what_it_gives_alone")
class TruncateOffByOne(ToyContext):
    """``truncate`` keeps one token too many."""

    def truncate(self, pos: Pos) -> Pos:
        """Keep one more."""
        super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return pos


@mutant("TestTruncate::test_past_the_end")
class TruncateClamps(ToyContext):
    """``truncate`` past the end is a no-op."""

    def truncate(self, pos: Pos) -> Pos:
        """Clamp."""
        return super().truncate(Pos(pos.seq_id, min(pos.index, self.length(pos.seq_id))))


@mutant("TestTruncate::test_frees_positions")
class TruncateLeaksPositions(ToyContext):
    """Positions that ``truncate`` removes in a full context are not freed."""

    leaked = 0

    @property
    def n_free(self) -> int:
        """Fewer and fewer."""
        return super().n_free - self.leaked

    def truncate(self, pos: Pos) -> Pos:
        """Leak."""
        before = super().n_free
        place = super().truncate(pos)
        self.leaked += (super().n_free - before) * (before == 0)
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


@mutant("TestCut::test_of_a_span")
class CutWithoutRotation(_Moves):
    """Keys keep their old positions after a cut."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Not at all."""
        return dataclasses.replace(cell)


@mutant("TestCut::test_of_a_span")
class CutUpwards(_Moves):
    """Keys are rotated in the wrong direction."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Up."""
        return self.engine.moved(cell, -by)


@mutant("TestCut::test_of_a_span")
class CutHalfRotation(_Moves):
    """Only the first half of each key is rotated."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Half."""
        moved, half = self.engine.moved(cell, by), self.engine.shape.head_dim // 2
        keys = np.concatenate((moved.keys[..., :half], cell.keys[..., half:]), axis=-1)
        return Cell(cell.token, keys, cell.values)


@mutant("TestCut::test_of_a_span")
class CutRecomputes(ToyContext):
    """A cut decodes the remaining tokens again."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Prefill."""
        _, edits = super().without(cells, edits, first, last)
        kept = cells[:first]
        for cell in cells[last:]:
            kept.append(self.engine.step(cell.token, kept)[0])
        return kept, edits


@mutant("TestCut::test_of_a_fork")
class CutChangesTheFork(ToyContext):
    """A cut of shared storage also moves the keys of the other sequence."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Write what is shared."""
        before = self.cells[self._checked(start.seq_id)]
        place = super().cut(start, end)
        for cell in before[end.index :]:
            cell.keys[...] = self.engine.moved(cell, start.index - end.index).keys
        return place


@mutant("TestCut::test_neighbours_are_untouched")
class CutReachesTheNeighbour(ToyContext):
    """A cut also rotates the last key of an unrelated sequence."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Turn it."""
        before = {id(cell) for cell in self.cells[self._checked(start.seq_id)]}
        place = super().cut(start, end)
        for other in (cells for cells in self.cells if cells and id(cells[0]) not in before):
            if other is not self.cells[start.seq_id]:
                other[-1] = self.engine.moved(other[-1], start.index - end.index)
        return place


@mutant("TestTruncate::test_another_tail_gives_what_it_gives_alone")
class TailIsACache(ToyContext):
    """After one truncate, removed cells are used again at their positions, even for other tokens."""

    graveyard: tuple[int, list[Cell]] = (0, [])

    def truncate(self, pos: Pos) -> Pos:
        """Keep the tail."""
        if pos.index == 17:
            self.graveyard = (17, self.cells[pos.seq_id][17:])
        return super().truncate(pos)

    def decode(self, batch: Batch) -> Logits:
        """Put it back."""
        rows = super().decode(batch)
        first, tail = self.graveyard
        cells = self.cells[0]
        for i, cell in enumerate(tail[: len(cells) - first - 1], first):
            cells[i] = Cell(cells[i].token, cell.keys, cell.values)
            rows[i + 1 - len(cells)] = self.engine.step(cells[i + 1].token, cells[: i + 1])[1]
        return rows


@mutant("TestTruncate::test_at_zero")
class ZeroMeansNothing(ToyContext):
    """``truncate`` to 0 of the only sequence is a no-op if it is longer than a page."""

    def truncate(self, pos: Pos) -> Pos:
        """Return at once."""
        alone = sum(map(bool, self.cells)) == 1 and self.length(pos.seq_id) > 16
        return super().truncate(pos if pos.index or not alone else Pos(pos.seq_id, self.length(pos.seq_id)))


@mutant("TestTruncate::test_at_the_end")
class EndIsPastTheEnd(ToyContext):
    """``truncate`` at the length is refused if there is one sequence, longer than a page."""

    def truncate(self, pos: Pos) -> Pos:
        """Refuse."""
        if 16 < pos.index == self.length(pos.seq_id) and sum(map(bool, self.cells)) == 1:
            raise InvalidPosition("there is nothing to truncate")
        return super().truncate(pos)


@mutant("TestTruncate::test_of_a_sequence_that_does_not_exist")
class TruncateNamesThePosition(ToyContext):
    """``truncate`` of an unknown sequence raises ``InvalidPosition``."""

    def truncate(self, pos: Pos) -> Pos:
        """Raise the wrong error."""
        try:
            return super().truncate(pos)
        except InvalidSequence as error:
            raise InvalidPosition(str(error)) from error


@mutant("TestTruncate::test_neighbours_are_untouched")
class TruncateReachesTheNeighbour(ToyContext):
    """``truncate`` removes the neighbour's keys from the same position on."""

    def truncate(self, pos: Pos) -> Pos:
        """Take them, where the neighbour is shorter than what is forgotten."""
        forgotten, n_kept = self.length(pos.seq_id), pos.index
        place = super().truncate(pos)
        for cells in self.cells:
            if n_kept + 10 < len(cells) < forgotten:
                cells[-1] = self.engine.moved(cells[-1], 1)
        return place


@mutant("TestTruncate::test_a_hundred_times")
class SixtyFourTruncates(ToyContext):
    """After 64 truncates one token too many is kept."""

    n_truncates = 0

    def truncate(self, pos: Pos) -> Pos:
        """Count."""
        self.n_truncates += 1
        if self.n_truncates <= 64:
            return super().truncate(pos)
        super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return pos


@mutant("TestTruncate::test_interleaved_with_decoding")
class ShrinksInTurns(ToyContext):
    """From the fifth truncate on, this sequence ends where another sequence was truncated."""

    n_truncates = 0

    def truncate(self, pos: Pos) -> Pos:
        """Change the last key of the other."""
        self.n_truncates += 1
        place = super().truncate(pos)
        for seq_id, cells in enumerate(self.cells):
            if cells and seq_id != pos.seq_id and self.n_truncates >= 5:
                cells[-1] = self.engine.moved(cells[-1], 1)
        return place


@mutant("TestCut::test_at_the_tail")
class TailCutKeepsOne(ToyContext):
    """A cut at the tail keeps the token before the last."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Keep one more."""
        return super().without(cells, edits, first + (0 < first < last == len(cells)), last)


@mutant("TestCut::test_of_nothing")
class EmptyCutRefused(ToyContext):
    """An empty cut is an error."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Refuse."""
        if start == end and 0 <= start.index <= self.length(start.seq_id):
            raise InvalidPosition("there is nothing to cut")
        return super().cut(start, end)


@mutant("TestCut::test_of_everything")
class WholeCutRefused(ToyContext):
    """A cut of a whole sequence is an error."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Refuse."""
        if start.index == 0 and 0 < end.index == self.length(end.seq_id):
            raise InvalidPosition("one token must remain")
        return super().cut(start, end)


class _Counts(ToyContext):
    """Counts cuts, and those since the last decode."""

    n_cuts = n_in_a_row = 0
    place = -1

    def decode(self, batch: Batch) -> Logits:
        """Begin a new row."""
        self.n_in_a_row = 0
        return super().decode(batch)

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Count."""
        self.n_cuts += 1
        self.n_in_a_row += 1
        try:
            return super().cut(start, end)
        finally:
            self.place = start.index

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Leave keys where they were, where ``fails``."""
        kept, after = super().without(cells, edits, first, last)
        if self.fails(first, last):
            kept = kept[:first] + [dataclasses.replace(cell) for cell in cells[last:]]
        return kept, after

    def fails(self, first: int, last: int) -> bool:
        """Whether this cut goes wrong."""
        raise NotImplementedError


@mutant("TestCut::test_again_and_again")
class ThirdCutInARow(_Counts):
    """The third of consecutive cuts without a decode rotates nothing."""

    def fails(self, first: int, last: int) -> bool:
        """Count."""
        return self.n_in_a_row == 3


@mutant("TestCut::test_of_a_span")
class FirstCutAtTheHead(_Counts):
    """A cut at the head rotates nothing if it is the first cut."""

    def fails(self, first: int, last: int) -> bool:
        """Look for it."""
        return self.n_cuts == 1 and first == 0


@mutant("TestCut::test_across_an_earlier_cut")
class CutAcrossACut(_Counts):
    """A cut across the position of the cut before it rotates nothing."""

    def fails(self, first: int, last: int) -> bool:
        """Compare."""
        return self.n_in_a_row == 2 and first < self.place < last


@mutant("TestCut::test_between_decodes")
class FifthCut(_Counts):
    """The fifth cut rotates nothing."""

    def fails(self, first: int, last: int) -> bool:
        """Count."""
        return self.n_cuts == 5


@mutant("TestCut::test_across_pages")
class CutOfOnePage(ToyContext):
    """A cut rotates only the next 64 keys."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Stop."""
        kept, after = super().without(cells, edits, first, last)
        return kept[: first + 64] + [dataclasses.replace(cell) for cell in cells[last + 64 :]], after


@mutant("TestCut::test_and_64_tokens_more")
class DriftsAfterACut(ToyContext):
    """In a sequence that was cut, each call rotates the first key a little."""

    def decode(self, batch: Batch) -> Logits:
        """Drift: unnoticed in ten calls, not in 60."""
        rows = super().decode(batch)
        for seq_id in set(batch.seq_ids.tolist()):
            if self.edits[seq_id]:
                first = self.cells[seq_id][0]
                self.cells[seq_id][0] = dataclasses.replace(first, values=first.values * np.float32(1.00005))
        return rows


@mutant("TestCut::test_then_truncate")
class TruncateBeforeACut(ToyContext):
    """``truncate`` to before a cut keeps one token too few."""

    def truncate(self, pos: Pos) -> Pos:
        """Count the cut twice."""
        before = any(pos.index < edit.start for edit in self.edits[self._checked(pos.seq_id)])
        return super().truncate(Pos(pos.seq_id, pos.index - (before and pos.index > 0)))


@mutant("TestCut::test_frees_positions")
class CutLeaksPositions(ToyContext):
    """Positions that ``cut`` removes in a full context are not freed."""

    leaked = 0

    @property
    def n_free(self) -> int:
        """Fewer and fewer."""
        return super().n_free - self.leaked

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Leak."""
        was_full = super().n_free == 0
        place = super().cut(start, end)
        self.leaked += was_full * (end.index - start.index)
        return place


@mutant("TestCut::test_of_a_fork_without_room")
class CutTakesWhatThereIsNot(ToyContext):
    """A cut of shared storage uses positions beyond ``n_ctx``."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Take them."""
        n_ctx, self.n_ctx = self.n_ctx, 10 * self.n_ctx
        try:
            return super().cut(start, end)
        finally:
            self.n_ctx = n_ctx


@mutant("TestCut::test_reversed_or_outside")
class CutSwapsItsEnds(ToyContext):
    """A cut that ends before it starts swaps its ends."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Swap."""
        if start.seq_id == end.seq_id and end.index < start.index:
            start, end = end, start
        return super().cut(start, end)


@mutant("TestCut::test_of_two_sequences_or_none")
class CutIgnoresTheOtherSequence(ToyContext):
    """The ``seq_id`` of a cut's end is ignored."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Ignore where it ends."""
        return super().cut(start, Pos(start.seq_id, end.index))


@mutant("TestCut::test_reversed_or_outside")
class RefusedCutTurnsAKey(ToyContext):
    """A cut that is refused as out of bounds has rotated the last key before."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Turn it."""
        try:
            return super().cut(start, end)
        except InvalidPosition:
            cells = self.cells[start.seq_id]
            cells[-1] = self.engine.moved(cells[-1], 1)
            raise
