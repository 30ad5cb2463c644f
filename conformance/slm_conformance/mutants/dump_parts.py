"""Mutants whose dumps in parts are wrong, or that restore invalid parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.container import PART_BYTES
from slm_core.context.checks import check_part_bytes
from slm_core.errors import ContextBusy, ContextFull, InvalidSnapshot, SequenceChanged
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


class _Watched:
    """Parts of a dump that call ``count`` with 1 at the first part, and with -1 at the end."""

    def __init__(self, parts: Iterator[bytes], count: Callable[[int], None]) -> None:
        self._parts, self._count, self._is_open = parts, count, False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            part = next(self._parts)
        except StopIteration:
            self._count(-self._is_open)
            self._is_open = False
            raise
        self._count(not self._is_open)
        self._is_open = True
        return part


class _Redirected:
    """Parts of a dump, each taken from the iterator that ``parts`` returns at that time."""

    def __init__(self, parts: Callable[[], Iterator[bytes]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._parts())


@mutant("TestDumpParts::test_are_the_dump")
class PartsAreLarge(ToyContext):
    """A part may be 32 bytes larger than requested."""

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Add 32 bytes to ``part_bytes``."""
        check_part_bytes(part_bytes)
        return super().dump_parts(seq_id, min(part_bytes + 32, PART_BYTES))


@mutant("TestDumpParts::test_sizes_and_sequences_that_do_not_exist")
class PartsFromTheEnd(ToyContext):
    """``dump_parts`` accepts a negative ``seq_id``, counted from the end."""

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Count a negative ``seq_id`` from the end."""
        return super().dump_parts(seq_id + self.n_seq_max if seq_id < 0 else seq_id, part_bytes)


@mutant("TestDumpParts::test_others_go_on_between_parts")
class BusyBetweenParts(ToyContext):
    """While a dump in parts is unfinished, ``decode`` refuses batches without sequence 0."""

    n_open = 0

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Count the unfinished dumps."""

        def count(n: int) -> None:
            self.n_open += n

        return _Watched(super().dump_parts(seq_id, part_bytes), count)

    def decode(self, batch: Batch) -> Logits:
        """Raise ``ContextBusy`` if a dump is unfinished and sequence 0 is not in the batch."""
        if self.n_open and 0 not in batch.seq_ids:
            raise ContextBusy("the context is dumped in parts")
        return super().decode(batch)


@mutant("TestDumpParts::test_two_at_once")
class OneDumpAtATime(ToyContext):
    """All dumps in parts return the parts of the dump that was begun last."""

    last: Iterator[bytes]

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Redirect all earlier dumps to the new one."""
        self.last = super().dump_parts(seq_id, part_bytes)
        return _Redirected(lambda: self.last)


@mutant("TestDumpParts::test_of_a_sequence_that_changes")
class ChangesUnnoticed(ToyContext):
    """A dump in parts continues after its sequence was changed."""

    @contextmanager
    def _unchanged(self, seq_id: int, cells: list[Cell]) -> Iterator[None]:
        with self._call():
            yield


@mutant("TestDumpParts::test_of_a_context_that_is_closed")
class PartsAfterClose(ToyContext):
    """A dump in parts continues after ``close``."""

    @contextmanager
    def _unchanged(self, seq_id: int, cells: list[Cell]) -> Iterator[None]:
        if self.closed:
            yield
            return
        with super()._unchanged(seq_id, cells):
            yield


@mutant("TestDumpParts::test_given_up")
class OpenDumpsTakeRoom(ToyContext):
    """An unfinished dump in parts takes up a free position."""

    n_open = 0

    @property
    def n_free(self) -> int:
        """The number of free positions less the number of unfinished dumps."""
        return super().n_free - self.n_open

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Count the unfinished dumps."""

        def count(n: int) -> None:
            self.n_open += n

        return _Watched(super().dump_parts(seq_id, part_bytes), count)


@mutant("TestRestoreParts::test_of_any_size")
class EmptyPartEndsTheDump(ToyContext):
    """``restore_parts`` takes an empty part for the end of the dump."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Stop at an empty part, unless the first part is empty."""
        all_parts = list(parts)
        return super().restore_parts(
            seq_id, itertools.takewhile(len, all_parts) if all_parts and all_parts[0] else all_parts
        )


@mutant("TestRestoreParts::test_from_a_context")
class RestoredPartsHaveNoEdits(ToyContext):
    """A sequence that is restored from parts has no edits."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Remove the edits after the restore."""
        returned = super().restore_parts(seq_id, parts)
        self.edits[seq_id] = []
        return returned


@mutant("TestRestoreParts::test_over_what_a_sequence_holds")
class PartsNeedRoomForBoth(ToyContext):
    """A dump in parts that replaces a longer sequence needs free positions for both."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Refuse a dump that is shorter than the sequence if the sequence would not fit once more."""
        before = self.cells[seq_id]
        returned = super().restore_parts(seq_id, parts)
        if len(before) > returned.index and self.n_free < len(before):
            self.cells[seq_id] = before
            raise ContextFull(returned.index, self.n_free)
        return returned


@mutant("TestRestoreParts::test_that_are_not_a_dump")
class PartsSorted(ToyContext):
    """If parts are not a dump, all parts after the first are tried in reverse order."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Reverse the parts after the first if the dump is invalid."""
        all_parts = list(parts)
        try:
            return super().restore_parts(seq_id, all_parts)
        except InvalidSnapshot:
            return super().restore_parts(seq_id, [*all_parts[:1], *all_parts[:0:-1]])


@mutant("TestRestoreParts::test_without_room")
class PartsWithoutRoomEmpty(ToyContext):
    """A dump in parts that does not fit leaves the sequence empty."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Empty the sequence if the dump does not fit."""
        try:
            return super().restore_parts(seq_id, parts)
        except ContextFull:
            self.replace(seq_id, [], [])
            raise


@mutant("TestRestoreParts::test_that_cannot_be_read")
class LostPartsEmptyTheSequence(ToyContext):
    """The sequence is emptied at the first part, and stays empty if a later part cannot be read."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Empty the sequence while the parts are read, and put it back after the last part."""
        before, came = (self.cells[seq_id], self.edits[seq_id]), []
        for part in parts:
            came.append(part)
            self.replace(seq_id, [], [])
        self.replace(seq_id, *before)
        return super().restore_parts(seq_id, came)


@mutant("TestRestoreSteps::test_others_go_on_between_steps")
class OtherSequencesEndARestore(ToyContext):
    """A restore in steps is cancelled when another sequence changes."""

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """Compare the lengths of all sequences before each step."""
        return self._watched(super().restore_steps(seq_id, parts))

    def _watched(self, steps: Iterator[None]) -> Iterator[None]:
        before = [len(cells) for cells in self.cells]
        for _ in steps:
            yield
            if [len(cells) for cells in self.cells] != before:
                raise SequenceChanged("another sequence was changed")


@mutant("TestRestoreSteps::test_given_up")
class DropGivesUpNoRestore(ToyContext):
    """``drop`` does not cancel a restore: other calls on its sequence are still refused."""

    def drop(self, seq_id: int) -> None:
        """Empty the sequence."""
        with self._call():
            self.replace(self._checked(seq_id), [], [])


@mutant("TestRestoreSteps::test_calls_that_fill_the_sequence")
class RestoringSequencesAreFilled(ToyContext):
    """Calls may add tokens to a sequence that is being restored."""

    def _changeable(self, seq_id: int) -> int:
        return self._checked(seq_id)


class _Ends(ToyContext):
    """A restore in steps ends at an error, without raising it."""

    hidden: type[BaseException]

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """Catch the error of a step."""
        return self._without_errors(super().restore_steps(seq_id, parts))

    def _without_errors(self, steps: Iterator[None]) -> Iterator[None]:
        with suppress(self.hidden):
            yield from steps


@mutant("TestRestoreSteps::test_that_are_not_a_dump")
class InvalidStepsEnd(_Ends):
    """A restore in steps of parts that are not a dump ends without an error."""

    hidden = InvalidSnapshot


@mutant("TestRestoreSteps::test_that_cannot_be_read")
class LostPartsEndARestore(_Ends):
    """A restore in steps whose parts cannot be read ends without an error."""

    hidden = OSError


@mutant("TestRestoreSteps::test_without_room")
class StepsWithoutRoomEnd(_Ends):
    """A restore in steps of a dump that does not fit ends without an error."""

    hidden = ContextFull
