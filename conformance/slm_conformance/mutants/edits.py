"""Mutants that truncate or cut wrongly."""

from __future__ import annotations

import dataclasses

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.snapshot import Edit
from slm_core.errors import ContextFull, InvalidPosition, InvalidSequence
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


@mutant("TestTruncate::test_another_tail_gives_what_it_gives_alone")
class TruncateOffByOne(ToyContext):
    """``truncate`` keeps one token too many."""

    def truncate(self, pos: Pos) -> Pos:
        """Truncate one token later than requested."""
        super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return pos


@mutant("TestTruncate::test_past_the_end")
class TruncateClamps(ToyContext):
    """``truncate`` past the end is a no-op."""

    def truncate(self, pos: Pos) -> Pos:
        """Clamp the position to the length."""
        return super().truncate(Pos(pos.seq_id, min(pos.index, self.length(pos.seq_id))))


@mutant("TestTruncate::test_frees_positions")
class TruncateLeaksPositions(ToyContext):
    """Positions that ``truncate`` removes in a full context are not freed."""

    leaked = 0

    @property
    def n_free(self) -> int:
        """The number of free positions less the number of leaked positions."""
        return super().n_free - self.leaked

    def truncate(self, pos: Pos) -> Pos:
        """Count the removed positions as leaked if the context was full."""
        before = super().n_free
        returned = super().truncate(pos)
        self.leaked += (super().n_free - before) * (before == 0)
        return returned


@mutant("TestTruncate::test_anywhere_in_a_long_sequence")
class WindowLosesItsFirstToken(ToyContext):
    """A truncate that ends one token before a page forgets an earlier token, if the sequence is long."""

    def truncate(self, pos: Pos) -> Pos:
        """Replace a cell by its neighbour."""
        returned, cells = super().truncate(pos), self.cells[pos.seq_id]
        if len(cells) > 256 and len(cells) % 64 == 63:
            self.cells[pos.seq_id] = [*cells[:-48], cells[-47], *cells[-47:]]
        return returned


@mutant("TestTruncate::test_numbers_of_numpy")
class PositionsOfPythonOnly(ToyContext):
    """A position has to be an ``int``."""

    def truncate(self, pos: Pos) -> Pos:
        """Refuse other integers."""
        if not isinstance(pos.index, int):
            raise InvalidPosition(f"position {pos.index!r}", seq_id=self._checked(pos.seq_id))
        return super().truncate(pos)


@mutant("TestTruncate::test_several_long_sequences")
class FarBackInTheThird(ToyContext):
    """A truncate that removes more than 64 tokens of the third sequence rotates the last remaining key."""

    def truncate(self, pos: Pos) -> Pos:
        """Move the last remaining key by one position."""
        is_far = pos.seq_id == 2 and self.length(2) - pos.index > 64
        returned, cells = super().truncate(pos), self.cells[pos.seq_id]
        if is_far and cells:
            self.cells[pos.seq_id] = [*cells[:-1], self.engine.moved(cells[-1], 1)]
        return returned


class _Moves(ToyContext):
    """A context whose cuts move the later cells with ``move``."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Cut, and move the later cells with ``move`` instead of the engine's method."""
        after_cut, edits = super().cut_cells(cells, edits, first, last)
        return after_cut[:first] + [self.move(cell, first - last) for cell in cells[last:]], edits

    def move(self, cell: Cell, by: int) -> Cell:
        """The cell moved by ``by`` positions, wrongly."""
        raise NotImplementedError


@mutant("TestCut::test_of_a_span")
class CutWithoutRotation(_Moves):
    """Keys keep their old positions after a cut."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Return the cell without rotating its key."""
        return dataclasses.replace(cell)


@mutant("TestCut::test_of_a_span")
class CutUpwards(_Moves):
    """A cut rotates keys in the wrong direction."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Rotate the key in the wrong direction."""
        return self.engine.moved(cell, -by)


@mutant("TestCut::test_of_a_span")
class CutHalfRotation(_Moves):
    """A cut rotates only the first half of each key."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Rotate only the first half of the key."""
        moved, half = self.engine.moved(cell, by), self.engine.shape.head_dim // 2
        keys = np.concatenate((moved.keys[..., :half], cell.keys[..., half:]), axis=-1)
        return Cell(cell.token, keys, cell.values)


@mutant("TestCut::test_of_a_span")
class CutRecomputes(ToyContext):
    """A cut decodes the remaining tokens again."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Decode the tokens after the cut again instead of rotating their keys."""
        _, edits = super().cut_cells(cells, edits, first, last)
        after_cut = cells[:first]
        for cell in cells[last:]:
            after_cut.append(self.engine.step(cell.token, after_cut)[0])
        return after_cut, edits


@mutant("TestCut::test_of_a_fork")
class CutChangesTheFork(ToyContext):
    """A cut of shared storage also rotates the keys of the other sequence."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Rotate the shared keys in place."""
        before = self.cells[self._checked(start.seq_id)]
        returned = super().cut(start, end)
        for cell in before[end.index :]:
            cell.keys[...] = self.engine.moved(cell, start.index - end.index).keys
        return returned


@mutant("TestCut::test_neighbours_are_untouched")
class CutReachesTheNeighbour(ToyContext):
    """A cut also rotates the last key of an unrelated sequence."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Rotate the last key of each sequence that does not share the first cell."""
        before = {id(cell) for cell in self.cells[self._checked(start.seq_id)]}
        returned = super().cut(start, end)
        for other in (cells for cells in self.cells if cells and id(cells[0]) not in before):
            if other is not self.cells[start.seq_id]:
                other[-1] = self.engine.moved(other[-1], start.index - end.index)
        return returned


@mutant("TestTruncate::test_another_tail_gives_what_it_gives_alone")
class TailIsACache(ToyContext):
    """The cells that ``truncate`` to 17 removes are used again at their positions, even for other tokens."""

    graveyard: tuple[int, list[Cell]] = (0, [])

    def truncate(self, pos: Pos) -> Pos:
        """Keep the cells that ``truncate`` to 17 removes."""
        if pos.index == 17:
            self.graveyard = (17, self.cells[pos.seq_id][17:])
        return super().truncate(pos)

    def decode(self, batch: Batch) -> Logits:
        """Overwrite the keys and values of new tokens with those of the removed cells."""
        rows = super().decode(batch)
        first, tail = self.graveyard
        cells = self.cells[0]
        for i, cell in enumerate(tail[: len(cells) - first - 1], first):
            cells[i] = Cell(cells[i].token, cell.keys, cell.values)
            rows[i + 1 - len(cells)] = self.engine.step(cells[i + 1].token, cells[: i + 1])[1]
        return rows


@mutant("TestTruncate::test_at_zero")
class ZeroMeansNothing(ToyContext):
    """``truncate`` to 0 does nothing if only one sequence is in use, with more than 16 tokens."""

    def truncate(self, pos: Pos) -> Pos:
        """Truncate the only sequence at its length in place of 0."""
        alone = sum(map(bool, self.cells)) == 1 and self.length(pos.seq_id) > 16
        return super().truncate(pos if pos.index or not alone else Pos(pos.seq_id, self.length(pos.seq_id)))


@mutant("TestTruncate::test_at_the_end")
class EndIsPastTheEnd(ToyContext):
    """``truncate`` at the length is refused if only one sequence is in use, with more than 16 tokens."""

    def truncate(self, pos: Pos) -> Pos:
        """Raise ``InvalidPosition`` at the length of the only sequence."""
        if 16 < pos.index == self.length(pos.seq_id) and sum(map(bool, self.cells)) == 1:
            raise InvalidPosition("there is nothing to truncate")
        return super().truncate(pos)


@mutant("TestTruncate::test_of_a_sequence_that_does_not_exist")
class TruncateNamesThePosition(ToyContext):
    """``truncate`` of an unknown sequence raises ``InvalidPosition``."""

    def truncate(self, pos: Pos) -> Pos:
        """Raise ``InvalidPosition`` in place of ``InvalidSequence``."""
        try:
            return super().truncate(pos)
        except InvalidSequence as error:
            raise InvalidPosition(str(error)) from error


@mutant("TestTruncate::test_neighbours_are_untouched")
class TruncateReachesTheNeighbour(ToyContext):
    """``truncate`` rotates the last key of other sequences that end inside the removed range."""

    def truncate(self, pos: Pos) -> Pos:
        """Rotate the last key of each sequence that ends more than 10 tokens into the removed range."""
        forgotten, n_kept = self.length(pos.seq_id), pos.index
        returned = super().truncate(pos)
        for cells in self.cells:
            if n_kept + 10 < len(cells) < forgotten:
                cells[-1] = self.engine.moved(cells[-1], 1)
        return returned


@mutant("TestTruncate::test_a_hundred_times")
class SixtyFourTruncates(ToyContext):
    """From the 65th ``truncate`` on, one token too many is kept."""

    n_truncates = 0

    def truncate(self, pos: Pos) -> Pos:
        """Truncate one token later than requested from the 65th call on."""
        self.n_truncates += 1
        if self.n_truncates <= 64:
            return super().truncate(pos)
        super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return pos


@mutant("TestTruncate::test_interleaved_with_decoding")
class ShrinksInTurns(ToyContext):
    """From the fifth ``truncate`` on, the last key of every other sequence is rotated."""

    n_truncates = 0

    def truncate(self, pos: Pos) -> Pos:
        """Rotate the last key of every other sequence from the fifth call on."""
        self.n_truncates += 1
        returned = super().truncate(pos)
        for seq_id, cells in enumerate(self.cells):
            if cells and seq_id != pos.seq_id and self.n_truncates >= 5:
                cells[-1] = self.engine.moved(cells[-1], 1)
        return returned


@mutant("TestCut::test_at_the_tail")
class TailCutKeepsOne(ToyContext):
    """A cut at the tail keeps the first token of its range."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Start a cut at the tail one token later."""
        return super().cut_cells(cells, edits, first + (0 < first < last == len(cells)), last)


@mutant("TestCut::test_of_nothing")
class EmptyCutRefused(ToyContext):
    """An empty cut is an error."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Raise ``InvalidPosition`` for an empty range."""
        if start == end and 0 <= start.index <= self.length(start.seq_id):
            raise InvalidPosition("there is nothing to cut")
        return super().cut(start, end)


@mutant("TestCut::test_of_everything")
class WholeCutRefused(ToyContext):
    """A cut of a whole sequence is an error."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Raise ``InvalidPosition`` for the range of the whole sequence."""
        if start.index == 0 and 0 < end.index == self.length(end.seq_id):
            raise InvalidPosition("one token must remain")
        return super().cut(start, end)


class _Counts(ToyContext):
    """Counts the cuts, and the cuts since the last decode; the cuts that ``fails`` selects rotate nothing."""

    n_cuts = n_in_a_row = 0
    last_start = -1

    def decode(self, batch: Batch) -> Logits:
        """Reset the count of cuts in a row."""
        self.n_in_a_row = 0
        return super().decode(batch)

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Count the cut, and store its start."""
        self.n_cuts += 1
        self.n_in_a_row += 1
        try:
            return super().cut(start, end)
        finally:
            self.last_start = start.index

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Leave the keys as they were if ``fails`` returns True."""
        after_cut, after = super().cut_cells(cells, edits, first, last)
        if self.fails(first, last):
            after_cut = after_cut[:first] + [dataclasses.replace(cell) for cell in cells[last:]]
        return after_cut, after

    def fails(self, first: int, last: int) -> bool:
        """Whether this cut rotates nothing."""
        raise NotImplementedError


@mutant("TestCut::test_again_and_again")
class ThirdCutInARow(_Counts):
    """The third cut without a decode in between rotates nothing."""

    def fails(self, first: int, last: int) -> bool:
        """Fail for the third cut in a row."""
        return self.n_in_a_row == 3


@mutant("TestCut::test_of_a_span")
class FirstCutAtTheHead(_Counts):
    """The first cut rotates nothing if it starts at position 0."""

    def fails(self, first: int, last: int) -> bool:
        """Fail for the first cut if it starts at position 0."""
        return self.n_cuts == 1 and first == 0


@mutant("TestCut::test_across_an_earlier_cut")
class CutAcrossACut(_Counts):
    """The second cut in a row rotates nothing if its range contains the start of the first."""

    def fails(self, first: int, last: int) -> bool:
        """Fail for the second cut in a row if its range contains the start of the first."""
        return self.n_in_a_row == 2 and first < self.last_start < last


@mutant("TestCut::test_between_decodes")
class FifthCut(_Counts):
    """The fifth cut rotates nothing."""

    def fails(self, first: int, last: int) -> bool:
        """Fail for the fifth cut."""
        return self.n_cuts == 5


@mutant("TestCut::test_across_pages")
class CutOfOnePage(ToyContext):
    """A cut rotates only the first 64 keys after it."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Leave all keys after the first 64 as they were."""
        after_cut, after = super().cut_cells(cells, edits, first, last)
        return after_cut[: first + 64] + [dataclasses.replace(cell) for cell in cells[last + 64 :]], after


@mutant("TestCut::test_and_64_tokens_more")
class DriftsAfterACut(ToyContext):
    """In a sequence that was cut, each call makes the first value slightly larger."""

    def decode(self, batch: Batch) -> Logits:
        """Scale the first value by 1.00005, which shows after 60 calls, but not after ten."""
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
        """Truncate one token earlier if a later position was cut."""
        before = any(pos.index < edit.start for edit in self.edits[self._checked(pos.seq_id)])
        return super().truncate(Pos(pos.seq_id, pos.index - (before and pos.index > 0)))


@mutant("TestCut::test_frees_positions")
class CutLeaksPositions(ToyContext):
    """Positions that ``cut`` removes in a full context are not freed."""

    leaked = 0

    @property
    def n_free(self) -> int:
        """The number of free positions less the number of leaked positions."""
        return super().n_free - self.leaked

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Count the removed positions as leaked if the context was full."""
        was_full = super().n_free == 0
        returned = super().cut(start, end)
        self.leaked += was_full * (end.index - start.index)
        return returned


@mutant("TestCut::test_of_a_fork_without_room")
class CutTakesWhatThereIsNot(ToyContext):
    """A cut of shared storage uses positions beyond ``n_ctx``."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Cut with ten times ``n_ctx``."""
        n_ctx, self.n_ctx = self.n_ctx, 10 * self.n_ctx
        try:
            return super().cut(start, end)
        finally:
            self.n_ctx = n_ctx


@mutant("TestCut::test_of_a_fork_into_freed_positions")
class CopiesKeepAPositionFree(ToyContext):
    """With four sequences in use, a cut needs 57 free positions if there are 56."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Raise ``ContextFull`` if 56 positions are free."""
        if self.n_free == 56 and sum(map(bool, self.cells)) == 4:
            raise ContextFull(57, 56)
        return super().cut(start, end)


@mutant("TestCut::test_reversed_or_outside")
class CutSwapsItsEnds(ToyContext):
    """A cut whose end is before its start swaps the two."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Swap start and end if they are reversed."""
        if start.seq_id == end.seq_id and end.index < start.index:
            start, end = end, start
        return super().cut(start, end)


@mutant("TestCut::test_of_two_sequences_or_none")
class CutIgnoresTheOtherSequence(ToyContext):
    """The ``seq_id`` of a cut's end is ignored."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Replace the ``seq_id`` of the end by that of the start."""
        return super().cut(start, Pos(start.seq_id, end.index))


@mutant("TestCut::test_reversed_or_outside")
class RefusedCutTurnsAKey(ToyContext):
    """A cut that is refused with ``InvalidPosition`` rotates the last key."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Rotate the last key before the error is raised."""
        try:
            return super().cut(start, end)
        except InvalidPosition:
            cells = self.cells[start.seq_id]
            cells[-1] = self.engine.moved(cells[-1], 1)
            raise
